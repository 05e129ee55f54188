"""inspect: what every token of a model does in a text or an image, as a page."""

import os
from pathlib import Path
from typing import Annotated

import typer

from .terminal import BadCommandError, TokenGroups, TrustRemoteCode, put_beside, quiet_libraries, show_summary

commands = typer.Typer()


@commands.command(
    "inspect", epilog='Example: tokenformer inspect runs/demo/stage-3/model --prompt "def test_" --out inspect.html'
)
def inspect_command(
    folder: Annotated[Path, typer.Argument(metavar="MODEL", help="The model folder.")],
    text: Annotated[
        Path | None, typer.Option(help="A text; its beginning is shown, as much as fits.", show_default=False)
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="A text itself.", show_default=False)] = None,
    image: Annotated[Path | None, typer.Option(help="An image, for a vision model.", show_default=False)] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page to write.", show_default="inspect.html")
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The model before it grew, to see what growth changed.",
            show_default="the stage before, in a run's folder",
        ),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="What `tokenformer index` wrote, for contexts from a larger text."),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A layer or a pattern, such as '*.ffn'; may be given several times."),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a live page on this machine: switch tokens off, and see.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of the live page; 0 takes a free one.", show_default="8000")
    ] = None,
    tokens: TokenGroups = None,
    device: Annotated[str, typer.Option(help="Where the model runs, for example cuda.")] = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write one page that shows what every parameter token does in a text: where it fires, what it makes likelier.

    The page has at most 5 MB, needs no network and can be sent to anybody; an earlier one is replaced. With --serve it
    is live instead: tokens can be switched off or scaled, and the model's answer changes.
    """
    given = {"--text": text, "--prompt": prompt, "--image": image}
    named = [option for option, value in given.items() if value is not None]
    if len(named) != 1:
        raise BadCommandError(
            f"{' and '.join(named)} exclude each other; give one of them"
            if named
            else "nothing to look at was given; give --text FILE or --prompt TEXT, or --image FILE for a vision model"
        )
    if serve and out is not None:
        raise BadCommandError("--serve writes no file; leave out --out, or leave out --serve")
    if port is not None and not serve:
        raise BadCommandError("--port is for the live page; give --serve too")

    from tokenformer.errors import require

    if serve:
        require("tokenformer inspect --serve", "serve")
    if index is not None:
        require("tokenformer inspect --index", "train", "pyarrow")

    from tokenformer.inspecting import load_inspection, write_inspection
    from tokenformer.inspecting.page import check_target

    target = out or Path("inspect.html")
    if not serve:
        check_target(target)
    quiet_libraries()
    inspection = load_inspection(
        folder,
        text=text,
        prompt=None if prompt is None else os.fsencode(prompt),
        image=image,
        before=before,
        index=index,
        layers=layers,
        device=device,
        put_beside=lambda model: put_beside(model, tokens),
        trust_remote_code=trust_remote_code,
    )
    for note in inspection.source.notes:
        typer.echo(note, err=True)
    if serve:
        from tokenformer.inspecting.live_server import LiveServer

        server = LiveServer(inspection, port=8000 if port is None else port)
        typer.echo(f"Inspecting {inspection.subject.name} at {server.address}")
        server.run()
        return
    written = write_inspection(inspection, target)
    show_summary(
        "Inspected",
        {
            f"{written.unit}s shown": f"{written.positions:,}",
            "tokens with a card": f"{written.tokens:,}",
            "written": f"{written.path}, {written.size / 1e6:.2f} MB",
        },
    )
