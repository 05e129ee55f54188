"""prepare: a configuration to datasets of token blocks. `tokenformer prepare SOURCE…` is its command.

Enters: DataConfig. Leaves: PreparedData: datasets for training, validation and test, the tokenizer, and what was
counted. The text is read once to hash and split it, and, if the cache does not have it, once more to tokenize it.
"""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from ..errors import BadRequestError
from .blocks import Blocks, BlockWriter
from .cache import Entry, find_or_make
from .config import PARTS, DataConfig, cache_folder, check_config
from .documents import Corpus
from .encode import Encoder, available_cores, batches, encode_all, make_encoder, naming_bad_text, token_type
from .progress import byte_bar
from .sources import find_sources
from .split import Selection, select
from .stream import BlockStream
from .tokenizer import load_tokenizer

FORMAT = 1
# Below this, starting workers takes longer than the work.
SMALL_CORPUS_BYTES = 4 * 1024 * 1024


@dataclass
class PreparedData:
    """What training needs.

    stats: documents, bytes, tokens, blocks, dropped (tokens of tails), empty, null, binary (passed over), replaced
        (broken UTF-8), and under `parts` the first five for each part.
    bytes_per_token: of the validation text, or of the training text without one; None if neither was counted.
    cached: it was found in the cache, which is in `folder`.
    """

    train: Blocks | BlockStream
    validation: Blocks | None
    test: Blocks | None
    tokenizer: PreTrainedTokenizerFast
    vocab_size: int
    eos_token_id: int
    stats: dict[str, Any]
    key: str
    bytes_per_token: float | None
    folder: Path | None
    cached: bool


def prepare(config: DataConfig, *, console: Console | None = None) -> PreparedData:
    """Prepare the text, or find it prepared. Progress goes to `console`, stderr if None."""
    check_config(config)
    console = console or Console(stderr=True)
    tokenizer = load_tokenizer(config.tokenizer, config.eos_token)
    encoder = make_encoder(tokenizer, config.tokenizer, config.errors == "strict")
    with byte_bar(console, "reading") as advance:
        selections = select(config, advance)
    settings = _settings(config, encoder, selections)
    key = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()
    entry = _packed(config, encoder, selections, settings, key, console) if selections else None
    stats = entry.manifest["stats"] if entry else _stats({}, [], 0)
    parts: dict[str, Blocks] = {}
    if entry:
        dtype = entry.manifest["dtype"]
        parts = {part: Blocks(entry.folder / f"{part}.bin", config.block_length, dtype) for part in stats["parts"]}
    counted = stats["parts"].get("validation") or stats["parts"].get("train")
    return PreparedData(
        train=_stream(config, encoder, selections) if config.streaming else parts["train"],
        validation=parts.get("validation"),
        test=parts.get("test"),
        tokenizer=tokenizer,
        vocab_size=encoder.vocab_size,
        eos_token_id=encoder.eos_token_id,
        stats=stats,
        key=key,
        bytes_per_token=counted["bytes"] / counted["tokens"] if counted else None,
        folder=entry.folder if entry else None,
        cached=bool(entry and entry.found),
    )


def _settings(config: DataConfig, encoder: Encoder, selections: list[Selection]) -> dict[str, Any]:
    """Everything that the prepared files depend on."""
    return {
        "format": FORMAT,
        "stream": [config.train, config.column, config.hub_config, config.hub_split] if config.streaming else None,
        "content": [selection.survey.content for selection in selections],
        "parts": [[*selection.parts, selection.rule] for selection in selections],
        "tokenizer": encoder.fingerprint,
        "eos": encoder.eos_token_id,
        "errors": config.errors,
        "block_length": config.block_length,
    }


def _packed(
    config: DataConfig,
    encoder: Encoder,
    selections: list[Selection],
    settings: dict[str, Any],
    key: str,
    console: Console,
) -> Entry:
    """The entry of the cache, made if need be. Outside of a terminal a line is said before and after."""
    began = time.perf_counter()
    total = sum(selection.survey.bytes for selection in selections)

    def make(folder: Path) -> dict[str, Any]:
        documents = sum(selection.survey.documents for selection in selections)
        _say(console, f"preparing {documents:,} documents, {total / 1e6:,.1f} MB, with tokenizer {config.tokenizer}")
        return {"key": key, "settings": settings, **_write(folder, config, encoder, selections, total, console)}

    entry = find_or_make(cache_folder(config), key, make)
    done = "found in the cache" if entry.found else f"prepared in {time.perf_counter() - began:.1f} s"
    _say(console, f"{entry.manifest['stats']['tokens']:,} tokens {done}: {entry.folder}")
    return entry


def _say(console: Console, line: str) -> None:
    if not console.is_terminal:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _write(
    folder: Path, config: DataConfig, encoder: Encoder, selections: list[Selection], total: int, console: Console
) -> dict[str, Any]:
    """Tokenize and write every part; the manifest of what was written."""
    dtype = token_type(encoder.vocab_size)
    workers = _workers(config, total)
    parts = sorted({part for selection in selections for part in selection.parts}, key=PARTS.index)
    writers = {part: BlockWriter(folder / f"{part}.bin", config.block_length, dtype) for part in parts}
    replaced = 0
    try:
        with byte_bar(console, "tokenizing", total) as advance:
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
                f"the {part} text has {count['tokens']:,} tokens, fewer than one block of {config.block_length:,}; "
                f"give more text or a smaller block_length"
                + (", or another validation_fraction (0 holds nothing out)" if part == "validation" else "")
            )
    return {
        "dtype": dtype.__name__,
        "files": {
            f"{part}.bin": {"size": (folder / f"{part}.bin").stat().st_size, "crc32": writer.crc32}
            for part, writer in writers.items()
        },
        "stats": _stats(counts, selections, replaced),
    }


def _workers(config: DataConfig, total: int) -> int:
    if config.tokenizer == "bytes":  # one core copies bytes faster than it could hand them to others
        return 1
    return config.workers or (1 if total < SMALL_CORPUS_BYTES else available_cores())


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


def _stream(config: DataConfig, encoder: Encoder, selections: list[Selection]) -> BlockStream:
    held_out = selections[0].held_out if selections else None
    corpus = Corpus(find_sources(config), config.column)
    return BlockStream(corpus, encoder, config.block_length, config.seed, config.shuffle_buffer, held_out)
