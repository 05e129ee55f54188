"""adopt: an existing Transformer into a TokenFormer that computes the same."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .terminal import BadCommandError, TrustRemoteCode, quiet_libraries, short, show_summary

commands = typer.Typer()


@commands.command("adopt", epilog="Example: tokenformer adopt EleutherAI/pythia-160m models/pythia --grow 1.5x")
def adopt_command(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a Hub name.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to make.")],
    parts: Annotated[
        str | None, typer.Option(metavar="ffn,qkv", help="What to adopt.", show_default="all the family has")
    ] = None,
    ballast: Annotated[
        str, typer.Option(help="spread (about as many extra tokens as the width) or single (one); docs/adopting.md.")
    ] = "spread",
    grow: Annotated[str | None, typer.Option(metavar="FACTOR", help="Then grow: 1.5x, 2x, …")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="With --grow: rotate, split, zero; docs/growing-a-model.md.", show_default="rotate"),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error.", show_default="1e-5 in fp32, 5e-2 in half precision")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the result: float32, bfloat16, …; half precision rounds the tokens.")
    ] = "auto",
    verify: Annotated[
        bool, typer.Option(" /--no-verify", show_default=False, help="Do not compare layers and logits.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Convert a Transformer into a TokenFormer that computes the same, in a new folder.

    Every layer is compared with what it replaces, and the logits with the original's; if they differ, nothing is
    written.
    """
    if method is not None and grow is None:
        raise BadCommandError(f"--method {method} was given, but it only works with --grow FACTOR")
    if method == "random":
        raise BadCommandError("--method random was given, and adopt is exact; it takes zero, split or rotate")
    growth = None if grow is None else {"factor": _factor(grow), "method": method}

    from tokenformer import cost
    from tokenformer.adoption.adopt_folder import adopt_folder

    from .facts import show_layers, whole_model_rows

    quiet_libraries()
    done = adopt_folder(
        source,
        target,
        None if parts is None else [part.strip() for part in parts.split(",") if part.strip()],
        ballast=ballast,
        growth=growth,
        verify=verify,
        tolerance=tolerance,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    costs = cost.adopted_layers(done.record)
    flops = short(costs.replaced_flops_per_token), short(costs.flops_per_token)
    if as_json:
        facts = {
            "layers": done.record.layers,
            "adopted_layers": asdict(costs),
            "difference": done.difference,
            "dtype": done.dtype,
            "parameters_before": done.parameters_before,
            "parameters_after": done.parameters_after,
            "written": str(target),
        }
        typer.echo(json.dumps(facts, indent=2))
        return
    show_layers(done.record)
    difference = "not compared" if done.difference is None else f"{done.difference:.2g}"
    show_summary(
        "Adopted" if growth is None else "Adopted and grown",
        {
            "parameters": f"{done.parameters_before:,} -> {done.parameters_after:,}",
            "FLOPs per token in these layers": " -> ".join(flops),
            **(whole_model_rows(done.host, done.config) if isinstance(done.host, cost.Config) else {}),
            "dtype": done.dtype,
            "relative difference of the output": difference,
            "written": str(target),
        },
    )


def _factor(text: str) -> float:
    try:
        return float(text.removesuffix("x"))
    except ValueError:
        raise BadCommandError(f"--grow {text} was given; a factor such as 1.5x is needed") from None
