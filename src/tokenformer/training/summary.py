"""The story of a run in a table, read from what it wrote down.

Enters: a run's folder. Leaves: a row a stage: parameters, tokens or images seen, validation loss before and after
growth, and at its end the loss and, of images, the accuracy, of the weights and of their average if there is one.
"""

import json
from pathlib import Path
from typing import Any

from rich.table import Table

# What a stage may have ended with, beside the loss of its weights.
MORE = {
    "validation_accuracy": "accuracy",
    "ema_validation_loss": "loss, averaged",
    "ema_validation_accuracy": "accuracy, averaged",
}


def stage_table(folder: Path) -> Table:
    """A table of the stages that have ended."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    growths = {line["stage"]: line for line in lines if line["kind"] == "growth"}
    ends = [line for line in lines if line["kind"] == "stage_end"]
    unit = "images" if "images" in ends[0] else "tokens"
    more = [name for name in MORE if name in ends[0]]
    table = Table("stage", "parameters", unit, "growth", "loss before growth", "after growth", "end of stage")
    for name in more:
        table.add_column(MORE[name])
    for column in table.columns[1:3] + table.columns[4:]:
        column.justify = "right"
    for end in ends:
        growth = growths.get(end["stage"], {})
        table.add_row(
            str(end["stage"]),
            f"{end['parameters']:,}",
            f"{end[unit]:,}",
            growth.get("method", "-"),
            _number(growth.get("validation_loss_before")),
            _number(growth.get("validation_loss_after")),
            _number(end.get("validation_loss")),
            *(_number(end.get(name)) for name in more),
        )
    return table


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}"
