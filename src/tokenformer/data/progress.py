"""A progress bar with the time left in a terminal; outside of one nothing, and the caller says one line instead."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from .documents import ignore


@contextmanager
def byte_bar(console: Console, description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Gives the function to call with each number of bytes that is done."""
    if not console.is_terminal:
        yield ignore
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)
