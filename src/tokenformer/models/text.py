"""Text in and out of a model: the byte tokenizer, the tokenizer of a model folder, and text as it is generated.

Enters: a model folder; text as str or bytes; ids as they are generated. Leaves: ids; pieces of text that never end
within a character.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from ..errors import BadFileError, BadRequestError, one_line
from .side_files import refuse_foreign_code, tokenizer_files

END_OF_TEXT = "<|endoftext|>"
# Byte-level tokenizers write a byte as the character of that number if it is visible, and the other bytes, in order, as
# the characters from 256 on.
_VISIBLE = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
BYTES = {chr(byte if byte in _VISIBLE else 256 + _HIDDEN.index(byte)): byte for byte in range(256)}
# Of the bytes alone, and with a token that ends a text.
BYTE_VOCABULARIES = (256, 257)


def byte_tokenizer(vocab_size: int = 257) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are the bytes; 256, if there are 257, ends a text. Text that spells that token stays text.

    Batches are padded with id 256 if there is one, and with byte 0 otherwise.
    """
    tokenizer = Tokenizer(models.BPE(vocab=BYTES, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT if vocab_size > 256 else None,
        pad_token=END_OF_TEXT if vocab_size > 256 else next(iter(BYTES)),
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def reads_bytes(tokenizer: Any) -> bool:
    """Whether this is a byte tokenizer, made here or read from a file, for which any bytes are text."""
    return len(tokenizer) <= 257 and BYTES.items() <= tokenizer.get_vocab().items()


def read_tokenizer(folder: str | os.PathLike, config: PreTrainedConfig, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder: its files if it has them, otherwise that of bytes if the vocabulary fits.

    A folder that does not exist is a name on the Hub.
    """
    hub, way_out = not Path(folder).is_dir(), "put the model's tokenizer.json into it"
    if not hub and not tokenizer_files(Path(folder)):
        if config.vocab_size in BYTE_VOCABULARIES:
            return byte_tokenizer(config.vocab_size)
        raise BadRequestError(
            f"{folder} has no tokenizer, and its vocabulary of {config.vocab_size:,} is not one of bytes (256 or 257); "
            f"{way_out}"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=not hub, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises Exception itself
        refuse_foreign_code(f"the tokenizer in {folder}", error)
        if no_backend(error):
            raise holds_no_tokenizer(folder, way_out) from error
        raise BadFileError(f"the tokenizer in {folder} cannot be read: {one_line(error)}") from error
    if not has_entries(tokenizer):
        raise holds_no_tokenizer(folder, way_out)
    return tokenizer


def no_backend(error: Exception) -> bool:
    """Whether transformers found settings of a tokenizer and nothing to make one from."""
    return "instantiate the backend tokenizer" in str(error)


def has_entries(tokenizer: Any) -> bool:
    """Whether it has more than special tokens, which is all that transformers gives some that have no files."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return bool(tokenizer.get_vocab().keys() - special - set(tokenizer.all_special_tokens))


def holds_no_tokenizer(place: str | os.PathLike, way_out: str) -> BadFileError:
    """The error for a folder, or a name on the Hub, whose tokenizer is missing or has no entries."""
    return BadFileError(f"{place} holds no tokenizer; {way_out}")


def write_byte_tokenizer(vocab_size: int, folder: str | os.PathLike) -> None:
    """Write the tokenizer of bytes beside weights, if the vocabulary is one of bytes and no tokenizer is there."""
    if vocab_size in BYTE_VOCABULARIES and not tokenizer_files(Path(folder)):
        byte_tokenizer(vocab_size).save_pretrained(folder)


def encode(tokenizer: Any, text: str | bytes, vocab_size: int) -> list[int]:
    """The ids of a text, with the tokenizer's own settings; an error if one is not below `vocab_size`."""
    if reads_bytes(tokenizer):
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
    """Passes text to `write` while it is generated, without the prompt: `generate(..., streamer=stream)`.

    Text is held back while its last character may be incomplete, which a tokenizer decodes to U+FFFD.
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
        # Of bytes without an end, the one that pads is text too.
        return self.tokenizer.decode(ids, skip_special_tokens=self.tokenizer.eos_token_id is not None)
