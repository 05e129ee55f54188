"""The texts by name: where the bytes of each come from, and which edition of them this machine has.

    enwik8      ../shared/data/enwik8.gz, or the file that ENWIK8 names, gzipped or not
    python      the source of Python's library
    fiction     passages from novels, as LAMBADA has them, with their last words
    questions   those of ARC (easy) and of PIQA, each with its possible answers
    cpp         headers of c10, the core of torch
    stubs       typeshed: the signatures of Python's library, as mypy has them
    misspelt    enwik8 with the ending "ation" as "atoin", everywhere: in one word of 92
    half_misspelt    the same at every second place
    facts       made sentences of 256 words, a byte for each, between passages of fiction: facts.py

Fiction and questions are read from ../shared/data/zero_shot, or from the folder that ZERO_SHOT names.
"""

import gzip
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenformer.data.text.settings import TextSettings
from tokenformer.data.text.sources import find_sources

from . import facts

RIGHT, WRONG = b"ation", b"atoin"
SHARED = Path(__file__).parents[3] / "shared" / "data"


def bytes_of(text: str) -> bytes:
    """All of a text."""
    if text not in TEXTS:
        raise SystemExit(f"{text!r} is not a text; choose from {', '.join(TEXTS)}")
    return TEXTS[text]()


def edition(text: str) -> str:
    """The name of a text, with the version of what it comes with."""
    if text == "python":
        return f"python {platform.python_version()}"
    return f"{text} {version(COMES_WITH[text])}" if text in COMES_WITH else text


def _enwik8() -> bytes:
    path = Path(os.environ.get("ENWIK8", SHARED / "enwik8.gz"))
    if not path.exists():
        raise SystemExit(f"{path} does not exist; let ENWIK8 name the file enwik8, gzipped or not")
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _python() -> bytes:
    return _joined(Path(source.name) for source in find_sources(TextSettings(train="stdlib")))


def _fiction() -> bytes:
    return "\n\n".join(row["text"] for row in _rows("lambada_openai.jsonl")).encode()


def _questions() -> bytes:
    asked = [[row["question"], *row["choices"]["text"]] for row in _rows("arc_easy.jsonl")]
    asked += [[row["goal"], row["sol1"], row["sol2"]] for row in _rows("piqa.jsonl")]
    return "\n\n".join("\n".join(lines) for lines in asked).encode()


def _rows(name: str) -> Iterator[dict[str, Any]]:
    path = Path(os.environ.get("ZERO_SHOT", SHARED / "zero_shot")) / name
    if not path.exists():
        raise SystemExit(f"{path} does not exist; let ZERO_SHOT name a folder with {name}")
    # Not splitlines(): a passage may contain other characters that end a line.
    return (json.loads(line) for line in path.read_text().split("\n") if line)


def _cpp() -> bytes:
    return _joined(sorted((_folder_of("torch") / "include" / "c10").rglob("*.h")))


def _stubs() -> bytes:
    return _joined(sorted((_folder_of("mypy") / "typeshed" / "stdlib").rglob("*.pyi")))


def _folder_of(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed, with which a text comes: pip install {package}")
    return Path(spec.origin).parent


def _joined(paths: Iterable[Path]) -> bytes:
    return b"\n".join(path.read_bytes() for path in paths)


def _facts() -> bytes:
    return facts.text_of(_fiction())


def _misspelt() -> bytes:
    return _enwik8().replace(RIGHT, WRONG)


def _half_misspelt() -> bytes:
    parts = _enwik8().split(RIGHT)
    joints = (WRONG if place % 2 else RIGHT for place in range(len(parts) - 1))
    return b"".join(part for pair in zip(parts, (*joints, b""), strict=True) for part in pair)


TEXTS: dict[str, Callable[[], bytes]] = {
    "enwik8": _enwik8,
    "python": _python,
    "fiction": _fiction,
    "questions": _questions,
    "cpp": _cpp,
    "stubs": _stubs,
    "misspelt": _misspelt,
    "half_misspelt": _half_misspelt,
    "facts": _facts,
}
COMES_WITH = {"cpp": "torch", "stubs": "mypy"}
