"""Measurements that outlive the machine: experiments/measured.jsonl, a line for every finished segment, by its name.

Enters: segments that are finished here, in runs/lab. Leaves: their measurements beside those of other machines, without
training losses and gradients, and what they were made with. From these a report can be made where nothing was trained,
and a new machine can train only what is missing.
"""

import json
from pathlib import Path
from typing import Any

from tokenformer.io import replace_file

from . import train

FILE = Path(__file__).parents[1] / "measured.jsonl"
KINDS = (
    "growth",
    "validation",
    "end",
    "test",
    "broken",
    "ballast",
    "domains",
    "inside",
    "fault",
    "fault units",
    "edits",
)


def take() -> None:
    """From now on what is kept counts as made."""
    train.KEPT.update(_read())


def keep() -> None:
    """Add what is finished here."""
    kept = _read()
    for path in train.STORE.glob("*/result.json"):
        result = json.loads(path.read_text())
        lines = [line for line in result["lines"] if line["kind"] in KINDS]
        # What was found out about the state on another machine stays.
        measured = {line["kind"] for line in lines}
        lines += [line for line in kept.get(path.parent.name, {"lines": []})["lines"] if line["kind"] not in measured]
        kept[path.parent.name] = {"made": result["made"], "lines": lines}
    rows = [json.dumps({"segment": name, **kept[name]}) for name in sorted(kept)]
    replace_file(FILE, "".join(f"{row}\n" for row in rows))


def _read() -> dict[str, dict[str, Any]]:
    read = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    return {one.pop("segment"): one for one in read}
