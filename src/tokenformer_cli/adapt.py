"""adapt: a token group trained beside a model, in a small folder of its own."""

from pathlib import Path
from typing import Annotated

import typer

from .terminal import quiet_libraries, say, show_summary

commands = typer.Typer()


@commands.command(
    "adapt", epilog='Example: tokenformer adapt models/mine adapters/law --data "law/*.txt" --tokens 16 --steps 500'
)
def adapt_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A TokenFormer, or another causal language model: a folder or a Hub name."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of the group to make.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value]…", help="Keys of a recipe that differ.")
    ] = None,
    data: Annotated[
        list[str], typer.Option(metavar="SOURCE", help="What to learn: files, globs, a Hub name; may be repeated.")
    ] = [],  # noqa: B006 - typer's way to say that an option may be repeated
    name: Annotated[str | None, typer.Option(help="What the group is called.", show_default="as OUT")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in each layer.")] = 16,
    where: Annotated[str, typer.Option(help="ffn, qkv, out, attention, all.")] = "ffn",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 500,
    learning_rate: Annotated[float, typer.Option(help="The highest.")] = 3e-3,
) -> None:
    """Train a token group beside a model, which stays as it is, and write the group alone.

    The run is written to OUT.run, with its recipe; run the same command again to resume. Then: tokenformer generate
    MODEL … --tokens OUT
    """
    from tokenformer.errors import BadRequestError

    if not data:
        raise BadRequestError('no data was given; say what to learn, as --data "law/*.txt"')
    quiet_libraries()
    from tokenformer.training.adapt import adapt_folder
    from tokenformer.training.run import StoppedError

    how = {"name": name, "tokens": tokens, "where": where, "steps": steps, "learning_rate": learning_rate}
    try:
        written = adapt_folder(source, target, data, overrides=overrides or [], **how)  # type: ignore[arg-type]
    except StoppedError as stop:
        say("stopped", stop)
        raise typer.Exit(stop.exit_code) from None
    size = sum(path.stat().st_size for path in written.iterdir())
    rows = {"group": str(written), "size": f"{size:,} bytes", "run": f"{target}.run"}
    show_summary("Adapted", {**rows, "try it": f"tokenformer generate {source} … --tokens {written}"})
