"""Small corpora for the tests of tokenformer.data, and what preparing them must give, computed the slow way."""

import io
import json
from pathlib import Path

import numpy as np
from rich.console import Console

from tokenformer.data.text import TextData, TextSettings

LINES = [f"line {i}: the quick brown fox, naïve façade, x = {i * i}\n" for i in range(60)]
EOS = 256


def prepared(folder: Path, train, said: io.StringIO | None = None, **settings) -> TextData:
    """Prepare with a cache of the test's own and a block length that suits small files."""
    train = [str(name) for name in train] if isinstance(train, list) else str(train)
    settings = {"block_length": 16, "validation_fraction": 0.0, "cache": str(folder / "cache"), **settings}
    return TextData(TextSettings(train=train, **settings)).prepare(Console(file=said or io.StringIO()))


def write_documents(folder: Path, documents: list[bytes]) -> list[Path]:
    """One text file a document."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i:04}.txt" for i in range(len(documents))]
    for path, document in zip(paths, documents, strict=True):
        path.write_bytes(document)
    return paths


def write_jsonl(path: Path, texts: list, column: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)))
    return path


def ids_of(blocks) -> np.ndarray:
    """All tokens of a dataset, one after the other."""
    parts = [np.asarray(item["input_ids"]) for item in (blocks[i] for i in range(len(blocks)))]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def byte_stream(documents: list[bytes]) -> np.ndarray:
    """Documents as bytes, each followed by the end token."""
    return np.array([i for document in documents if document for i in (*document, EOS)], np.int64)


def same_blocks(ours, theirs) -> bool:
    return np.array_equal(ids_of(ours), ids_of(theirs))
