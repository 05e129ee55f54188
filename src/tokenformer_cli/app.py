"""The `tokenformer` command, put together: the global options and the list of commands."""

from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from . import (
    adapt,
    adopt,
    evaluate,
    export,
    generate,
    grow,
    index,
    info,
    inspect,
    official,
    plan,
    prepare,
    quantize,
    report,
    serve,
    shrink,
    train,
)
from .terminal import Commands

app = typer.Typer(
    cls=Commands,
    name="tokenformer",
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.add_typer(train.commands)
app.add_typer(generate.commands)
app.add_typer(serve.commands)
app.add_typer(evaluate.commands)
app.add_typer(grow.commands)
app.add_typer(shrink.commands)
app.add_typer(quantize.commands)
app.add_typer(adopt.commands)
app.add_typer(adapt.commands)
app.add_typer(index.commands)
app.add_typer(inspect.commands)
app.add_typer(info.commands)
app.add_typer(export.commands)
app.add_typer(official.commands)
app.add_typer(report.commands)
app.add_typer(prepare.commands)
app.add_typer(plan.commands)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tokenformer {installed_version('tokenformer')}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def tokenformer(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Neural networks whose parameters are tokens: train once, grow exactly, train on."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """The entry point of the `tokenformer` script."""
    app()
