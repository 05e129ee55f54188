"""How a command ends: exit code and one line on stderr.

    0     done
    1     failed: a broken file, a result that did not pass its check, or an error nobody foresaw
    2     a request that cannot be carried out as it stands
    130   interrupted

A traceback is shown only if `--debug` stands before the command's name.
"""

import os
import sys
import traceback
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from ..errors import BadFileError, BadRequestError, BadResultError, one_line


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
        except Exception as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            if isinstance(error, BadRequestError | BadFileError | BadResultError):
                say("error", error)
            else:
                hint = "" if ctx.params["debug"] else " (tokenformer --debug … shows where)"
                say("error", f"{type(error).__name__}: {error}{hint}")
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
        line.append(f": {one_line(message)}", "default")
    Console(stderr=True).print(line, soft_wrap=True)
