"""How a command speaks: what it prints when it is done, and how it ends, with an exit code and one line on stderr.

    0     done
    1     failed: a broken file, a result that did not pass its check, or an unforeseen error
    2     a request that cannot be carried out as it stands
    130   interrupted

A traceback is shown only if `--debug` is given before the command's name.
"""

import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

# An option of every command that reads a model or a tokenizer.
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with it, where transformers has none.")
]

# An option of commands that run a model.
TokenGroups = Annotated[
    list[str] | None,
    typer.Option(
        "--tokens", metavar="[NAME=]FOLDER", help="A token group to put beside the model; may be given several times."
    ),
]

# An option of commands that need no more than a part of a model.
TokenFraction = Annotated[
    float | None,
    typer.Option(
        "--token-fraction",
        metavar="SHARE",
        help="Take this share of every layer's tokens, of a model that `sort` or nested training has put in order.",
        show_default="all",
    ),
]

# In a file or a pipe a table is as wide as it needs to be.
WIDEST_TABLE = 400


def put_beside(model: Any, given: Sequence[str] | None) -> None:
    """Load the token groups that `--tokens` names."""
    from tokenformer.groups import load_tokens
    from tokenformer.models.kept_groups import NAME

    for one in given or ():
        name, equals, folder = one.partition("=")
        # The path of a folder may have an equals sign of its own.
        named = equals and NAME.fullmatch(name) and not Path(one).exists()
        load_tokens(model, folder if named else one, name if named else None)


def counts_by_role(tokens: str) -> dict[str, int]:
    """`qkv=8,ffn=32` as a dictionary. The planner knows which roles there are."""
    counts = {}
    for part in tokens.split(","):
        role, _, count = part.partition("=")
        if not count.strip().isdecimal():
            raise BadCommandError(f"--tokens {tokens}: {part!r} is not of the form role=count, for example ffn=4096")
        if role.strip() in counts:
            raise BadCommandError(f"--tokens {tokens}: {role.strip()} is given twice; give one count for it")
        counts[role.strip()] = int(count)
    return counts


def show_summary(title: str, rows: Mapping[str, str]) -> None:
    """Print rows of a label and a value."""
    console = Console()
    width = max(len(label) for label in rows)
    console.print(Text(title, "bold green"))
    for label, value in rows.items():
        # A long path stays on its line, where it can be copied.
        console.print(Text.assemble("  ", (label.ljust(width), "dim"), "  ", value), soft_wrap=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> None:
    """Print a table whose first column names its rows, and a note below it.

    Where the terminal is too narrow, the columns that do not fit follow below, with the first one again.
    """
    rows, console = list(rows), Console()
    width = console.width if console.is_terminal or "COLUMNS" in os.environ else WIDEST_TABLE
    widths = [
        max(cell_len(text) for line in (columns, *rows) for text in line[i].split("\n")) for i in range(len(columns))
    ]
    for i, shown in enumerate(_fitting(widths, width)):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
        for j in shown:
            table.add_column(Text(columns[j]), justify="left" if j == 0 else "right", vertical="bottom", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(row[j]) for j in shown))
        if i > 0:
            console.print()
        Console(width=max(width, sum(widths[j] + 1 for j in shown))).print(table)
    if note:
        console.print(Text(note, "dim"), soft_wrap=width == WIDEST_TABLE)


def _fitting(widths: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each table, all of which have the first one, so that none is wider than `width` if possible."""
    tables = [[0]]
    for i in range(1, len(widths)):
        if len(tables[-1]) > 1 and sum(widths[j] + 1 for j in (*tables[-1], i)) - 1 > width:
            tables.append([0])
        tables[-1].append(i)
    return tables


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
    hub_logging.set_verbosity_error()  # without a network it reports every attempt


class BadCommandError(Exception):
    """A mistake in the command line itself, reported before the library is imported."""


class Commands(TyperGroup):
    """Typer's group of commands, with our way of ending them."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; turn what it raises into an exit code."""
        try:
            return super().invoke(ctx)
        except (typer.TyperException, typer.Exit, typer.Abort, BrokenPipeError):
            raise  # Typer's own; `main` below and Typer deal with them
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(130) from None
        except BadCommandError as error:
            say("error", error)
            raise typer.Exit(2) from error
        except Exception as error:  # the last resort: whatever it is, the user gets one line
            from tokenformer.errors import BadFileError, BadRequestError, BadResultError

            if ctx.params["debug"]:
                traceback.print_exc()
            if isinstance(error, BadRequestError | BadFileError | BadResultError):
                say("error", error)
            else:
                hint = "" if ctx.params["debug"] else " (tokenformer --debug … shows where)"
                say("error", f"{_in_words(error)}{hint}")
            raise typer.Exit(2 if isinstance(error, BadRequestError) else 1) from error

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line. Typer would frame a mistake in it over several lines; we say it in one."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except typer.TyperException as error:
            context = getattr(error, "ctx", None)
            where = context.command_path if context else "tokenformer"
            message = error.format_message() + _given(error)
            say("error", f"{message}{'' if message.endswith(('.', '?')) else '.'} See {where} --help.")
            code = error.exit_code
        sys.exit(code or 0)


def _in_words(error: Exception) -> str:
    """An error that no one foresaw. Those of the machine have words of their own; of a bug, its name helps."""
    if isinstance(error, ModuleNotFoundError):
        return f"the Python package {error.name} is not installed; install it with pip"
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "allocate memory" in str(error):
        return f"out of memory; use a smaller batch, context or model: {error}"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename} cannot be read or written" if error.filename else "a file cannot be read or written"
        return f"{where}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _given(error: Exception) -> str:
    """The value that an option did not take, which Typer does not repeat."""
    problems: list[Any] = getattr(error.__cause__, "errors", list)()  # of pydantic, which converts what is given
    return f"; {problems[0]['input']!r} was given" if problems else ""


def say(what: str, message: object = None) -> None:
    """Print one line on stderr. Of several processes under torchrun, the first speaks for all."""
    if os.environ.get("RANK", "0") != "0":
        return
    line = Text(what, "bold red")
    if message is not None:
        line.append(f": {' '.join(str(message).split())}", "default")
    Console(stderr=True).print(line, soft_wrap=True)
