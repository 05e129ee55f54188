"""Local rows of tasks, checked before the harness reads them.

Enters: task names and a folder with a JSONL file for each, named after it, in the columns of the stock task. Leaves:
the SHA-256 of each file. A row that a task would choke on, or silently count as wrong, is named by file and line.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadFileError, BadRequestError
from ..io import parse_json


@dataclass(frozen=True)
class RowFormat:
    """What a row of a task must be: columns with their types, and a condition that `says` puts into words."""

    columns: dict[str, type]
    holds: Callable[[dict], bool]
    says: str


_ARC = RowFormat(
    {"question": str, "choices": dict, "answerKey": str},
    lambda row: (
        row["answerKey"] in row["choices"]["label"]
        and _texts(row["choices"]["text"])
        and _texts(row["choices"]["label"])
        and len(row["choices"]["text"]) == len(row["choices"]["label"])
    ),
    "choices must have a list `text` and a list `label` as long, with the answerKey in it",
)
ROW_FORMATS = {
    "lambada_openai": RowFormat(
        {"text": str},
        lambda row: " " in row["text"].strip() and row["text"] == row["text"].rstrip(),
        "text must have two words or more, and end with one",
    ),
    "hellaswag": RowFormat(
        {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list, "label": str},
        lambda row: _texts(row["endings"]) and 0 <= int(row["label"]) < len(row["endings"]),
        "label must be the number, from 0 on, of one of the endings",
    ),
    "piqa": RowFormat(
        {"goal": str, "sol1": str, "sol2": str, "label": int},
        lambda row: row["label"] in (0, 1),
        "label must be 0 or 1",
    ),
    "arc_easy": _ARC,
    "arc_challenge": _ARC,
    "winogrande": RowFormat(
        {"sentence": str, "option1": str, "option2": str, "answer": str},
        lambda row: "_" in row["sentence"] and row["answer"] in ("1", "2"),
        'sentence must have a _ for the options, and answer be "1" or "2"',
    ),
}


def check_files(names: Iterable[str], folder: Path) -> dict[str, str]:
    """Read the file of every task, and refuse what does not fit. Leaves the SHA-256 of each."""
    if not folder.is_dir():
        raise BadRequestError(f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}; check --data")
    return {name: _check_file(name, folder / f"{name}.jsonl") for name in names}


def _check_file(name: str, path: Path) -> str:
    if not path.is_file():
        raise BadRequestError(f"{path} does not exist; --data needs a file for every task, named after it")
    digest, rows = hashlib.sha256(), 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            digest.update(line)
            if line.strip():
                _check_row(name, line, f"{path} line {number}")
                rows += 1
    if not rows:
        raise BadFileError(f"{path} has no rows; a row of task {name} is one line of JSON")
    return digest.hexdigest()


def _check_row(name: str, line: bytes, where: str) -> None:
    row = parse_json(line, where)
    if not isinstance(row, dict):
        raise BadFileError(f"{where} is not a row: an object with columns is expected")
    expected = ROW_FORMATS.get(name)
    if expected is None:  # a task whose columns only the harness knows
        return
    for column, kind in expected.columns.items():
        if column not in row:
            raise BadFileError(f"{where} has no column {column!r}; {name} needs {', '.join(expected.columns)}")
        if not isinstance(row[column], kind):
            raise BadFileError(f"{where}: {column} must be a {kind.__name__}, not {json.dumps(row[column])[:40]}")
    try:
        fits = expected.holds(row)
    except (TypeError, ValueError, KeyError):
        fits = False
    if not fits:
        raise BadFileError(f"{where}: {expected.says}")


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
