"""grow: a saved model into a larger one that computes the same."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import BadRequestError
from .summary import quiet_libraries, short, show_summary, show_table

commands = typer.Typer()


@commands.command("grow", epilog="Example: tokenformer grow models/small models/large --factor 2 --method split")
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
    method: Annotated[str, typer.Option(help="zero, split, rotate or random; see docs/growth.md.")] = "zero",
    seed: Annotated[int, typer.Option(help="Decides the new tokens.")] = 0,
    noise: Annotated[float, typer.Option(help="Size of split's random parts.")] = 1.0,
    inexact: Annotated[bool, typer.Option("--inexact", help="Allow a method that changes the model.")] = False,
    verify: Annotated[
        bool, typer.Option(" /--no-verify", show_default=False, help="Do not compare the logits before and after.")
    ] = True,
) -> None:
    """Grow a model folder into a new one: a TokenFormer of language or of images, or an adopted model.

    Tokenizer or image processor come along.

    Give one of --factor, --to and --tokens. The logits before and after are compared, and if an exact method moved them
    nothing is written.
    """
    sizes = {"--factor": factor, "--to": to, "--tokens": tokens}
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) != 1:
        raise BadRequestError(f"{' and '.join(given) or 'no size'} was given; give one of {', '.join(sizes)}")
    if method == "random" and not inexact:
        raise BadRequestError(
            "method random changes what the model computes; add --inexact to accept that, or use zero, split or rotate"
        )
    num_tokens = _counts(tokens) if tokens is not None else None

    from ..growth.folder import grow_folder

    quiet_libraries()
    done = grow_folder(
        source,
        target,
        factor=factor,
        to=to,
        num_tokens=num_tokens,
        method=method,
        seed=seed,
        noise=noise,
        exact=not inexact,
        verify=verify,
    )
    before, after = _facts(done.before), _facts(done.after)
    show_table(["", "before", "after"], [(label, before[label], after[label]) for label in before])
    difference = "not looked at" if done.difference is None else f"{done.difference:.2g}"
    show_summary("Grown", {"relative difference of logits": difference, "written": str(target)})


def _counts(tokens: str) -> dict[str, int]:
    """`qkv=8,ffn=32` as a dictionary. Which roles there are is the planner's to say."""
    counts = {}
    for part in tokens.split(","):
        role, _, count = part.partition("=")
        if not count.strip().isdecimal():
            raise BadRequestError(f"--tokens {tokens}: {part!r} is not of the form role=count, for example ffn=4096")
        if role.strip() in counts:
            raise BadRequestError(f"--tokens {tokens}: {role.strip()} stands there twice; give one count for it")
        counts[role.strip()] = int(count)
    return counts


def _facts(config: Any) -> dict[str, str]:
    from .. import cost
    from ..growth.folder import taus
    from ..models import TokenFormerVisionConfig, record_of
    from .adopt import in_order

    record = record_of(config)
    if record is not None:
        costs = cost.adopted_layers(record)
        return {
            **{f"tokens, {name}": f"{record.layers[name]['num_tokens']:,}" for name in in_order(record.layers)},
            "parameters in these layers": f"{costs.parameters:,}",
            "FLOPs a token in these layers": short(costs.flops_per_token),
        }
    if isinstance(config, TokenFormerVisionConfig):
        flops = {f"FLOPs an image of {config.image_size} pixels": short(cost.forward_flops_per_image(config))}
    else:
        length = config.max_position_embeddings
        flops = {f"FLOPs a token at length {length:,}": short(cost.forward_flops_per_token(config, length))}
    return {
        "parameters": f"{cost.parameters(config).total:,}",
        **{f"tokens, {role}": f"{count:,}" for role, count in config.num_tokens.items()},
        **{f"tau, {role}": f"{tau:.4g}" for role, tau in taus(config).items()},
        **flops,
    }
