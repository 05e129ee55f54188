"""Tables in Markdown that are made from results.json and stand in pages between two marks.

    <!-- table: progressive_scaling ladder -->
    … made, not written …
    <!-- end -->

Enters: the findings of an experiment. Leaves: pages whose tables say what the results say; a test compares them.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"<!-- table: ([\w-]+) (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
ROOT = Path(__file__).parents[2]
IMAGE_HEADER = ["accuracy, validation", "accuracy, test", "loss, test"]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_spread(found: dict[str, Any] | None, digits: int = 3) -> str:
    """A mean and the standard deviation beside it."""
    if found is None:
        return "-"
    deviation = f" ± {found['deviation']:.{digits}f}" if found["deviation"] is not None else ""
    return f"{found['mean']:.{digits}f}{deviation}"


def percent(found: dict[str, Any]) -> str:
    """A mean share and its standard deviation, in percent."""
    deviation = f" ± {100 * found['deviation']:.1f}" if found["deviation"] is not None else ""
    return f"{100 * found['mean']:.1f}{deviation} %"


def image_cells(found: dict[str, Any]) -> list[str]:
    """Accuracy on validation and on test images, and the loss on the latter: IMAGE_HEADER."""
    return [percent(found["accuracy"]), percent(found["test_accuracy"]), with_spread(found["test"])]


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def change(value: float) -> str:
    """How far a loss moved; what rounds to nothing has no sign of its own."""
    return f"{round(value, 4) + 0.0:+.4f}"


def growth_table(ladders: dict[str, list[dict[str, Any]]]) -> str:
    """The growth steps of ladders by name, as `growth_steps` finds them."""
    rows = [
        [
            name,
            f"{one['blocks']} blocks of {one['tokens']} tokens",
            str(one["step"]),
            change(one["rise"]),
            change(one["above"]),
        ]
        for name, steps in ladders.items()
        for one in steps
    ]
    return markdown(["ladder", "grown to", "step", "rise at growth", "rise over 20 steps, at most"], rows)


def pages() -> list[Path]:
    """All pages that may have such tables."""
    return [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "experiments").glob("*/README.md"))]


def findings_of(name: str) -> dict[str, Any]:
    """What an experiment found, as it is committed; nothing if it was not run yet."""
    results = ROOT / "experiments" / name / "results.json"
    return json.loads(results.read_text())["findings"] if results.exists() else {}


def with_tables(text: str, tables_of: Callable[[str], dict[str, str]]) -> str:
    """A page's text with its tables made anew."""

    def fresh(block: re.Match[str]) -> str:
        name, table, _ = block.groups()
        return f"<!-- table: {name} {table} -->\n{tables_of(name)[table]}<!-- end -->"

    return BLOCK.sub(fresh, text)
