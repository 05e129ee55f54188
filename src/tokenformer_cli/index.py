"""index: what makes every token of a saved language model fire, on a text."""

from pathlib import Path
from typing import Annotated

import typer

from .terminal import TrustRemoteCode, quiet_libraries, show_summary

commands = typer.Typer()
EVERY = 10.0  # seconds from one line of progress to the next
GIGABYTE = 10**9


@commands.command("index", epilog="Example: tokenformer index runs/demo/stage-3/model runs/demo/index --text book.txt")
def index_command(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="The model folder.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of the index.")],
    text: Annotated[Path, typer.Option(help="A text of the kind that the model is for.")],
    limit: Annotated[int | None, typer.Option(help="How many of its tokens are read.", show_default="all")] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A layer or a pattern, such as '*.ffn'; may be given several times."),
    ] = None,
    examples: Annotated[int, typer.Option(help="How many contexts are kept for each token.")] = 20,
    device: Annotated[str, typer.Option(help="Where the model runs, for example cuda.")] = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write what makes every token fire: its contexts, its use and selectivity, and the words that it promotes.

    The text is read once. Interrupted, the same command goes on where it stopped; finished, it says what is there. In
    Python `tokenformer.TokenIndex(OUT)` reads it.
    """
    from tokenformer.inside.index_folder import index_folder

    quiet_libraries()
    next_line = [EVERY]

    def show(read: int, total: int, seconds: float) -> None:
        if seconds >= next_line[0] and read < total:
            left = seconds / read * (total - read)
            typer.echo(f"{read:,} of {total:,} tokens  {left:,.0f} s left", err=True)
            next_line[0] = seconds + EVERY

    index, bytes_each = index_folder(
        source,
        target,
        text,
        limit=limit,
        layers=layers,
        examples=examples,
        device=device,
        trust_remote_code=trust_remote_code,
        show=show,
    )
    positions = index.facts["positions"]
    hours = index.seconds_for(round(GIGABYTE / bytes_each)) / 3600
    show_summary(
        "Indexed",
        {
            "tokens of the model": f"{len(index):,} in {len(index.layers)} layers",
            "tokens of the text": f"{positions:,} in {index.facts['seconds']:,.0f} s",
            "1 GB would take": f"{hours:,.1f} hours",
            "written": str(target),
        },
    )
