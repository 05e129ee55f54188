"""TextData: text as a language model is trained on it. `tokenformer prepare SOURCE…` prepares it beforehand.

Enters: TextSettings. Leaves: blocks of token ids for training, validation and test, the tokenizer, and what was
counted. The text is read once to hash and split it, and, if the cache does not have it, once more to tokenize it; or,
as a stream, while training.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedTokenizerFast
from typing_extensions import Self

from ... import cost
from ...errors import BadRequestError
from ...models import TokenFormerConfig, TokenFormerForCausalLM
from ...models.loading import read_model
from ..base import PARTS, STREAM_FILE, Shuffled, TrainingData, available_cores
from ..sources import as_list
from .documents import Corpus, ignore
from .encode import Encoder, batches, encode_all, make_encoder, naming_bad_text, token_type
from .packing import Blocks, BlockWriter, Entry, find_or_make
from .settings import TextSettings
from .sources import find_sources
from .split import Selection, select
from .stream import BlockStream, StreamedBlocks
from .tokenizer import load_tokenizer

FORMAT = 1  # of the prepared files; another number makes them anew
# Below this, starting workers takes longer than the work.
SMALL_CORPUS_BYTES = 4 * 1024 * 1024


class TextData(TrainingData):
    """Text as blocks of tokens. After `prepare`:

    train, validation, test: the blocks of each part; validation and test are None if there are none.
    stats: documents, bytes, tokens, blocks, dropped (tokens of tails), empty, null, binary (passed over), replaced
        (broken UTF-8), and under `parts` the first five for each part.
    bytes_per_token: of the validation text, or of the training text without one; None if neither was counted.
    cached: it was found in the cache, in `folder`.
    """

    unit, per_unit = "tokens", "per token"
    config_class, model_class = TokenFormerConfig, TokenFormerForCausalLM

    settings: TextSettings
    train: Blocks | BlockStream
    validation: Blocks | None = None
    test: Blocks | None = None
    stats: dict[str, Any]
    bytes_per_token: float | None
    folder: Path | None = None
    cached: bool = False

    def __init__(self, settings: TextSettings, *, trust_remote_code: bool = False) -> None:
        # Not among the settings: a recipe must not decide whether the code of a tokenizer is run.
        self.settings, self.trust_remote_code = settings, trust_remote_code
        self.tokenizer: PreTrainedTokenizerFast | None = None
        self.vocab_size: int | None = None  # None until the tokenizer is loaded
        self.eos_token_id: int | None = None

    @property
    def samples_name(self) -> str:
        return f"blocks of {self.settings.block_length}"

    @property
    def units_per_sample(self) -> int:
        return self.settings.block_length

    @property
    def sources(self) -> list[str]:
        return [*as_list(self.settings.train), *as_list(self.settings.validation)]

    def check(self, batch: int, loader_workers: int) -> None:
        if self.settings.streaming and loader_workers:
            raise BadRequestError(
                "training.dataloader_num_workers is given and data.streaming is true; a stream is read by one process: "
                "leave it at 0"
            )

    def inspect(self, *, count_samples: bool) -> None:
        """The tokenizer, if it need not be fetched."""
        name = self.settings.tokenizer
        if name == "bytes" or Path(name).expanduser().exists():
            self._load_tokenizer()

    def _load_tokenizer(self) -> Encoder:
        self.tokenizer = load_tokenizer(
            self.settings.tokenizer, self.settings.eos_token, trust_remote_code=self.trust_remote_code
        )
        encoder = make_encoder(self.tokenizer, self.settings.tokenizer, self.settings.errors == "strict")
        self.vocab_size, self.eos_token_id = encoder.vocab_size, encoder.eos_token_id
        return encoder

    def prepare(self, console: Console | None = None) -> Self:
        """Prepare the text, or find it prepared."""
        settings, console = self.settings, console or Console(stderr=True)
        encoder = self._load_tokenizer()
        with _byte_bar(console, "reading") as advance:
            selections = select(settings, advance)
        identity = _identity(settings, encoder, selections)
        self.key = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()
        self.stats = _stats({}, [], 0)
        parts: dict[str, Blocks] = {}
        if selections:
            entry = _packed(settings, encoder, selections, identity, self.key, console)
            self.folder, self.cached, self.stats = entry.folder, entry.found, entry.facts["stats"]
            parts = {
                part: Blocks(entry.folder / f"{part}.bin", settings.block_length, entry.facts["dtype"])
                for part in self.stats["parts"]
            }
        self.train = _stream(settings, encoder, selections) if settings.streaming else parts["train"]
        self.validation, self.test = parts.get("validation"), parts.get("test")
        counted = self.stats["parts"].get("validation") or self.stats["parts"].get("train")
        self.bytes_per_token = counted["bytes"] / counted["tokens"] if counted else None
        return self

    def config_fields(self, given: dict[str, Any]) -> dict[str, Any]:
        # No longer than a block: positions that were never trained on hurt more than longer context helps.
        fields: dict[str, Any] = {"max_position_embeddings": self.settings.block_length}
        if self.vocab_size is not None and self.tokenizer is not None:
            fields["vocab_size"] = _padded(self.vocab_size)
            fields["bos_token_id"] = fields["eos_token_id"] = self.eos_token_id
            fields["pad_token_id"] = self.tokenizer.pad_token_id
        return fields

    def adjust_config(self, config: TokenFormerConfig) -> None:
        if config.max_position_embeddings < self.settings.block_length:
            raise BadRequestError(
                f"data.block_length is {self.settings.block_length}; the model reads {config.max_position_embeddings} "
                "(model.max_position_embeddings)"
            )
        if self.vocab_size is not None and config.vocab_size < self.vocab_size:
            raise BadRequestError(
                f"model.vocab_size is {config.vocab_size}; the tokenizer has {self.vocab_size} entries: leave it out, "
                f"or widen a checkpoint first with model.resize_token_embeddings({self.vocab_size})"
            )
        config.chunked_loss = True

    def restore_config(self, config: TokenFormerConfig) -> None:
        config.chunked_loss = False

    def first_model(self, config: TokenFormerConfig, checkpoint: str | None) -> tuple[TokenFormerForCausalLM, bool]:
        if checkpoint is None:
            return TokenFormerForCausalLM(config), False
        return read_model(checkpoint, config=config, dtype=torch.float32), True

    def implied_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        # A stream starts at its place; of prepared data Trainer skips what has been used.
        return {"ignore_data_skip": self.settings.streaming}

    def in_order(self, steps: int, samples_per_step: int, checkpoint: Path) -> Dataset:
        if not isinstance(self.train, BlockStream):
            return Shuffled(self.train, steps * samples_per_step, self.settings.seed)
        path = checkpoint / STREAM_FILE
        state = torch.load(path, weights_only=True) if path.exists() else None
        steps_done = int(checkpoint.name.rpartition("-")[2])
        return StreamedBlocks(self.train, samples_per_step, steps_done, state)

    def held_out(self, most: int | None) -> Dataset | None:
        if self.validation is None:
            return None
        return Subset(self.validation, range(min(len(self.validation), most or len(self.validation))))

    def score(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, float]:
        loss = model(**batch).loss.item() * len(batch["input_ids"])
        # The text as it was before it was tokenized: so that runs with different tokenizers can be compared.
        return {"loss": loss, **({"bits_per_byte": loss / math.log(2) / per} if (per := self.bytes_per_token) else {})}

    def save_beside(self, folder: Path) -> None:
        assert self.tokenizer is not None
        self.tokenizer.save_pretrained(folder)

    def assumptions(self, config: TokenFormerConfig) -> dict[str, str]:
        if self.vocab_size is not None:
            return {}
        return {"vocabulary": f"{config.vocab_size:,} is assumed: the tokenizer {self.settings.tokenizer} is not here"}

    def flops(self, config: TokenFormerConfig) -> tuple[float, float]:
        length = self.settings.block_length
        return cost.forward_flops_per_token(config, length), cost.training_flops_per_token(config, length)

    def memory(
        self, config: TokenFormerConfig, batch: int, optimizer: str, gradient_checkpointing: bool
    ) -> cost.TrainingMemory:
        length = self.settings.block_length
        return cost.training_memory(
            config, batch, length, optimizer=optimizer, gradient_checkpointing=gradient_checkpointing
        )


def _padded(entries: int) -> int:
    """Rows of the embedding: large ones are padded to a multiple of 128, as the authors do (50,277 to 50,304)."""
    return entries if entries < 1000 else -(-entries // 128) * 128


def _identity(settings: TextSettings, encoder: Encoder, selections: list[Selection]) -> dict[str, Any]:
    """Everything that the prepared files depend on."""
    return {
        "format": FORMAT,
        "stream": [settings.train, settings.column, settings.hub_config, settings.hub_split]
        if settings.streaming
        else None,
        "content": [selection.survey.content for selection in selections],
        "parts": [[*selection.parts, selection.rule] for selection in selections],
        "tokenizer": encoder.fingerprint,
        "eos": encoder.eos_token_id,
        "errors": settings.errors,
        "block_length": settings.block_length,
    }


def _packed(
    settings: TextSettings,
    encoder: Encoder,
    selections: list[Selection],
    identity: dict[str, Any],
    key: str,
    console: Console,
) -> Entry:
    """The entry of the cache, made if need be. Outside of a terminal, a line is printed before and after."""
    began = time.perf_counter()
    total = sum(selection.survey.bytes for selection in selections)

    def make(folder: Path) -> dict[str, Any]:
        documents = sum(selection.survey.documents for selection in selections)
        _say(console, f"preparing {documents:,} documents, {total / 1e6:,.1f} MB, with tokenizer {settings.tokenizer}")
        return {"key": key, "settings": identity, **_write(folder, settings, encoder, selections, total, console)}

    entry = find_or_make(settings.cache_folder, key, make)
    done = "found in the cache" if entry.found else f"prepared in {time.perf_counter() - began:.1f} s"
    _say(console, f"{entry.facts['stats']['tokens']:,} tokens {done}: {entry.folder}")
    return entry


def _say(console: Console, line: str) -> None:
    if not console.is_terminal:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _write(
    folder: Path, settings: TextSettings, encoder: Encoder, selections: list[Selection], total: int, console: Console
) -> dict[str, Any]:
    """Tokenize and write every part; returns its facts."""
    dtype = token_type(encoder.vocab_size)
    workers = _workers(settings, total)
    parts = sorted({part for selection in selections for part in selection.parts}, key=PARTS.index)
    writers = {part: BlockWriter(folder / f"{part}.bin", settings.block_length, dtype) for part in parts}
    replaced = 0
    try:
        with _byte_bar(console, "tokenizing", total) as advance:
            for selection in selections:
                with naming_bad_text(selection.corpus):
                    for batch, encoded in encode_all(batches(selection.pieces()), encoder, workers):
                        size = sum(len(piece.data) for piece in batch.pieces)
                        documents = sum(piece.place.offset == 0 for piece in batch.pieces)
                        writers[batch.part].add(encoded.ids, size, documents)
                        replaced += encoded.replaced
                        advance(size)
    finally:
        counts = {part: writer.close() for part, writer in writers.items()}
    for part, count in counts.items():
        if count["blocks"] == 0:
            raise BadRequestError(
                f"the {part} text has {count['tokens']:,} tokens, fewer than one block of {settings.block_length:,}; "
                f"use more text or a smaller block_length"
                + (", or another validation_fraction (0 holds nothing out)" if part == "validation" else "")
            )
    return {"dtype": dtype.__name__, "stats": _stats(counts, selections, replaced)}


def _workers(settings: TextSettings, total: int) -> int:
    if settings.tokenizer == "bytes":  # one core copies bytes faster than it could hand them to others
        return 1
    return settings.workers or (1 if total < SMALL_CORPUS_BYTES else available_cores())


def _stats(parts: dict[str, dict[str, int]], selections: list[Selection], replaced: int) -> dict[str, Any]:
    summed = {
        name: sum(part[name] for part in parts.values())
        for name in ("documents", "bytes", "tokens", "blocks", "dropped")
    }
    passed_over = {
        name: sum(selection.survey.counts.get(name, 0) for selection in selections)
        for name in ("empty", "null", "binary")
    }
    return {**summed, **passed_over, "replaced": replaced, "parts": parts}


def _stream(settings: TextSettings, encoder: Encoder, selections: list[Selection]) -> BlockStream:
    held_out = selections[0].held_out if selections else None
    corpus = Corpus(find_sources(settings), settings.column)
    return BlockStream(corpus, encoder, settings.block_length, settings.seed, settings.shuffle_buffer, held_out)


@contextmanager
def _byte_bar(console: Console, description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A progress bar; yields the function to call with the number of bytes done."""
    if not console.is_terminal:
        yield ignore
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)
