"""The story of a run in a table, read from what it wrote down.

Enters: a run's folder. Leaves: a row a stage: parameters, tokens seen, validation loss before and after growth, and at
the end of the stage.
"""

import json
from pathlib import Path
from typing import Any

from rich.table import Table


def stage_table(folder: Path) -> Table:
    """A table of the stages that have ended."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    growths = {line["stage"]: line for line in lines if line["kind"] == "growth"}
    table = Table("stage", "parameters", "tokens", "growth", "loss before growth", "after growth", "end of stage")
    for column in table.columns[1:3] + table.columns[4:]:
        column.justify = "right"
    for end in (line for line in lines if line["kind"] == "stage_end"):
        growth = growths.get(end["stage"], {})
        table.add_row(
            str(end["stage"]),
            f"{end['parameters']:,}",
            f"{end['tokens']:,}",
            growth.get("method", "-"),
            _loss(growth.get("validation_loss_before")),
            _loss(growth.get("validation_loss_after")),
            _loss(end["validation_loss"]),
        )
    return table


def _loss(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}"
