"""serve: a model behind OpenAI's interface."""

from pathlib import Path
from typing import Annotated

import typer

from .terminal import BadCommandError, TokenGroups, TrustRemoteCode, put_beside, quiet_libraries

commands = typer.Typer()
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@commands.command("serve", epilog="Example: tokenformer serve models/mine --tokens law=adapters/law --port 8000")
def serve_command(
    folder: Annotated[Path, typer.Argument(metavar="MODEL", help="The model folder.")],
    tokens: TokenGroups = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="SHARES",
            help="Offer these shares of a sorted model's tokens, too, as names such as mine@0.5; with commas between.",
            show_default="the whole model alone",
        ),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantise the model's tokens to eight bits.")] = False,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model.", show_default="the folder's name")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="TOKENFORMER_API_KEY",
            help="Ask every client for this key. Set the variable instead: a command line can be read by other users.",
            show_default="none",
        ),
    ] = None,
    running: Annotated[int, typer.Option(min=1, help="How many answers are computed at once.")] = 16,
    waiting: Annotated[int, typer.Option(min=0, help="How many may wait; more are refused with 429.")] = 64,
    max_prompt: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of a prompt.", show_default="the context")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 1024,
    max_body: Annotated[int, typer.Option(min=1, help="The most bytes of a request.")] = 2**20,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="How long running answers may take after SIGTERM.")
    ] = 60.0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …", show_default="the fastest")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's API has it, with a page to try it at `/`.

    Requests name the model by its folder, a size after an at sign, and token groups after a colon: `mine`, `mine@0.5`,
    `mine:law+fr`, `mine@0.5:law`. Many requests are computed together, each in its size and with its own groups.
    SIGTERM and Ctrl-C finish what runs, and then end.
    """
    offered = _shares(sizes)
    if api_key is not None and not api_key.strip():
        raise BadCommandError("the API key is empty; set one, or none")

    from tokenformer.errors import require

    require("tokenformer serve", "serve")

    from tokenformer.serving import Limits, Server, load_served

    quiet_libraries()
    served = load_served(
        folder,
        name=name,
        device=device,
        put_beside=lambda model: put_beside(model, tokens),
        int8=int8,
        sizes=offered,
        trust_remote_code=trust_remote_code,
    )
    limits = Limits(
        running=running,
        waiting=waiting,
        prompt=max_prompt,
        new_tokens=max_new_tokens,
        body=max_body,
        drain_seconds=drain_seconds,
    )

    server = Server(served, host=host, port=port, key=api_key, limits=limits)
    typer.echo(f"Serving {', '.join(served.names)} at {server.address}")
    if host not in LOOPBACK and api_key is None:
        typer.echo("Anyone who reaches this machine can ask it: no API key is set.", err=True)
    server.run()


def _shares(sizes: str | None) -> list[float]:
    """`0.5,0.25` as numbers. Whether they are shares, and of what, the server's loader knows."""
    try:
        return [float(size) for size in sizes.split(",")] if sizes is not None else []
    except ValueError as error:
        raise BadCommandError(f"--sizes {sizes}: numbers are expected, for example 0.5,0.25") from error
