"""What a command prints when it is done: a title and a few aligned rows, or a table, in a terminal or a log file."""

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# A table is never squeezed into a narrow terminal, where it would lose columns; its rows run on.
WIDEST_TABLE = 400


def show_summary(title: str, rows: Mapping[str, str]) -> None:
    """Print rows of a label and a value."""
    console = Console()
    width = max(len(label) for label in rows)
    console.print(Text(title, "bold green"))
    for label, value in rows.items():
        # A long path stays on its line, where it can be copied.
        console.print(Text.assemble("  ", (label.ljust(width), "dim"), "  ", value), soft_wrap=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> None:
    """Print a table whose first column names its rows, and a note below it."""
    console = Console(width=WIDEST_TABLE)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    if note:
        console.print(Text(note, "dim"), soft_wrap=True)


def short(number: float, unit: str = "") -> str:
    """A number with three digits and a decimal prefix: 1.42G."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.5 or prefix == "P":
            break
        number /= 1000
    return f"{number:.3g}{prefix}{unit}"


def quiet_libraries() -> None:
    """No progress bars and warnings from transformers, in commands that check and report for themselves."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()  # without a network it tells of every attempt
