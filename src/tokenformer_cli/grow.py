"""grow: a saved model into a larger one that computes the same."""

from pathlib import Path
from typing import Annotated

import typer

from .terminal import BadCommandError, TrustRemoteCode, counts_by_role, quiet_libraries, show_summary, show_table

commands = typer.Typer()


@commands.command("grow", epilog="Example: tokenformer grow models/small models/large --factor 2")
def grow_command(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="The model folder.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to make.")],
    factor: Annotated[float | None, typer.Option(help="Times as many tokens in every layer.")] = None,
    to: Annotated[str | None, typer.Option(metavar="PRESET", help="The token counts of a preset.")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE=COUNT,…", help="Token counts: qkv=1024,out=1024,ffn=4096; of an adopted model `*.mlp.*=4096`."
        ),
    ] = None,
    depth: Annotated[int | None, typer.Option(help="The number of blocks.")] = None,
    new_blocks: Annotated[str, typer.Option(help="copy or fresh: what new blocks are made from.")] = "copy",
    new_blocks_at: Annotated[str, typer.Option(help="after_each or top: where new blocks are placed.")] = "after_each",
    method: Annotated[
        str | None,
        typer.Option(
            help="rotate, split, zero or random; see docs/growing-a-model.md.", show_default="rotate, where it is exact"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides the new tokens.")] = 0,
    noise: Annotated[float, typer.Option(help="Size of split's random parts.")] = 1.0,
    inexact: Annotated[bool, typer.Option("--inexact", help="Allow a method that changes the model.")] = False,
    verify: Annotated[
        bool, typer.Option(" /--no-verify", show_default=False, help="Do not compare the logits before and after.")
    ] = True,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Grow a model folder into a new one: a TokenFormer for language or images, or an adopted model.

    Its tokenizer or image processor is copied too.

    Give one of --factor, --to, --tokens and --depth; --depth may stand beside --factor or --tokens. The logits before
    and after are compared, and if an exact method changed them, nothing is written.
    """
    sizes = {"--factor": factor, "--to": to, "--tokens": tokens, "--depth": depth}
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) != 1 and given not in (["--factor", "--depth"], ["--tokens", "--depth"]):
        raise BadCommandError(
            f"{' and '.join(given) or 'no size'} was given; give one of {', '.join(sizes)}; --depth may stand beside "
            "--factor or --tokens"
        )
    if method == "random" and not inexact:
        raise BadCommandError(
            "method random changes what the model computes; add --inexact to accept that, or use zero, split or rotate"
        )
    num_tokens = counts_by_role(tokens) if tokens is not None else None

    from tokenformer.growth.grow_folder import grow_folder

    from .facts import growth_rows

    quiet_libraries()
    done = grow_folder(
        source,
        target,
        factor=factor,
        to=to,
        num_tokens=num_tokens,
        depth=depth,
        new_blocks=new_blocks,
        new_blocks_at=new_blocks_at,
        method=method,
        seed=seed,
        noise=noise,
        exact=not inexact,
        verify=verify,
        trust_remote_code=trust_remote_code,
    )
    before, after = growth_rows(done.before), growth_rows(done.after)
    show_table(["", "before", "after"], [(label, before[label], after[label]) for label in before])
    difference = "not compared" if done.difference is None else f"{done.difference:.2g}"
    show_summary("Grown", {"relative difference of logits": difference, "written": str(target)})
