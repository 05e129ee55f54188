"""Text in and out of a saved model: the tokenizer of its folder, or raw bytes, and text as it is generated.

Enters: a model folder; text as str or bytes; ids as they are generated. Leaves: ids; pieces of text that never end
within a character.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.generation.streamers import BaseStreamer

from ..errors import BadFileError, BadRequestError, one_line
from .folder import tokenizer_files


class ByteTokenizer:
    """Ids are bytes. With a vocabulary of 257, id 256 is the end of a text."""

    def __init__(self, vocab_size: int) -> None:
        self.eos_token_id = 256 if vocab_size == 257 else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids. As in transformers' tokenizers, bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def read_tokenizer(folder: str | os.PathLike, config: PreTrainedConfig) -> Any:
    """The tokenizer of a model folder: transformers' if it has one, raw bytes if the vocabulary is bytes.

    A folder that does not exist is a name on the Hub.
    """
    hub = not Path(folder).is_dir()
    if not hub and not tokenizer_files(Path(folder)):
        if config.vocab_size in (256, 257):
            return ByteTokenizer(config.vocab_size)
        raise BadRequestError(
            f"{folder} has no tokenizer, and its vocabulary of {config.vocab_size:,} is not one of bytes (256 or 257); "
            "put the model's tokenizer.json into it"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=not hub)
    except Exception as error:  # tokenizers raises no narrower class
        raise BadFileError(f"the tokenizer in {folder} cannot be read: {one_line(error)}") from error


def encode(tokenizer: Any, text: str | bytes, vocab_size: int) -> list[int]:
    """The ids of a text, as the tokenizer makes them by itself, each below `vocab_size`."""
    if isinstance(tokenizer, ByteTokenizer):
        ids = list(text.encode() if isinstance(text, str) else text)
    else:
        ids = tokenizer(as_text(text), verbose=False)["input_ids"]
    if max(ids, default=0) >= vocab_size:
        raise BadRequestError(
            f"the tokenizer gave the id {max(ids)}, and the model has {vocab_size} rows; give the model's own tokenizer"
        )
    return ids


def as_text(text: str | bytes) -> str:
    """Bytes as the text they encode."""
    try:
        return text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the text is not UTF-8: {one_line(error)}") from error


class TextStream(BaseStreamer):
    """Gives text to `write` while `generate` makes it, the prompt left out: `generate(..., streamer=stream)`.

    Text is held back while its last character may be half of one, which a tokenizer decodes to U+FFFD.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], Any]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.ids: list[int] = []
        # Ids up to `written` are written. Those from `start` are decoded with the new ones, because a token's text
        # depends on its neighbour: some tokenizers drop the space before the first.
        self.start = self.written = 0
        self.in_prompt = True

    def put(self, value: Tensor) -> None:
        if self.in_prompt:
            self.in_prompt = False
            return
        self.ids += value.flatten().tolist()
        self._write_text(final=False)

    def end(self) -> None:
        self._write_text(final=True)

    def _write_text(self, final: bool) -> None:
        known = self._decode(self.ids[self.start : self.written])
        text = self._decode(self.ids[self.start :])
        if len(text) > len(known) and (final or not text.endswith("\ufffd")):
            self.write(text[len(known) :])
            self.start, self.written = self.written, len(self.ids)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)
