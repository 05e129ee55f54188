"""What a command prints when it is done: a title and a few aligned rows, in a terminal or in a log file."""

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text


def show_summary(title: str, rows: Mapping[str, str]) -> None:
    """Print rows of a label and a value."""
    console = Console()
    width = max(len(label) for label in rows)
    console.print(Text(title, "bold green"))
    for label, value in rows.items():
        # A long path stays on its line, where it can be copied.
        console.print(Text.assemble("  ", (label.ljust(width), "dim"), "  ", value), soft_wrap=True)


def quiet_libraries() -> None:
    """No progress bars and warnings from transformers, in commands that check and report for themselves."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
