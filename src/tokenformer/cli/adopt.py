"""adopt: a Transformer that exists into a TokenFormer that computes the same."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadRequestError
from .summary import quiet_libraries, short, show_summary, show_table

if TYPE_CHECKING:
    from ..models import Adopted

commands = typer.Typer()
COLUMNS = ["layer", "kind", "tokens", "ballast", "numbers", "error"]
NOTE = (
    "tokens: parameter tokens. ballast: how many of them were there at adoption to keep the norm constant. numbers: in "
    "keys and values, over those in the matrices that stood there. error: at adoption, relative to the largest output."
)


@commands.command("adopt", epilog="Example: tokenformer adopt EleutherAI/pythia-160m models/pythia --grow 1.5x")
def adopt_command(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a Hub name.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to make.")],
    parts: Annotated[
        str | None, typer.Option(metavar="ffn,qkv", help="What to adopt.", show_default="all the family has")
    ] = None,
    ballast: Annotated[
        str, typer.Option(help="spread (as many tokens more as the width) or single (one); docs/adopting.md.")
    ] = "spread",
    grow: Annotated[str | None, typer.Option(metavar="FACTOR", help="Then grow: 1.5x, 2x, …")] = None,
    method: Annotated[
        str | None, typer.Option(help="With --grow: zero, split or rotate; see docs/growth.md.", show_default="zero")
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
) -> None:
    """Make a model folder whose linears and feed-forward networks are Pattentions that compute the same.

    Every layer is compared with what it replaces, and the logits with the original's; if they differ, nothing is
    written.
    """
    if method is not None and grow is None:
        raise BadRequestError(f"--method {method} was given, which goes with --grow FACTOR")
    if method == "random":
        raise BadRequestError("--method random was given, and adopt is exact; it takes zero, split or rotate")
    growth = None if grow is None else {"factor": _factor(grow), "method": method or "zero"}

    from .. import cost
    from ..adoption.folder import adopt_folder

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
    )
    costs = cost.adopted_layers(done.record)
    flops = short(costs.replaced_flops_per_token), short(costs.flops_per_token)
    if as_json:
        import json
        from dataclasses import asdict

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
    difference = "not looked at" if done.difference is None else f"{done.difference:.2g}"
    show_summary(
        "Adopted" if growth is None else "Adopted and grown",
        {
            "parameters": f"{done.parameters_before:,} -> {done.parameters_after:,}",
            "FLOPs a token in these layers": " -> ".join(flops),
            **(_whole(done.host, done.config) if isinstance(done.host, cost.Config) else {}),
            "dtype": done.dtype,
            "relative difference of the output": difference,
            "written": str(target),
        },
    )


def _whole(*configs: Any) -> dict[str, str]:
    """What a GPT-NeoX or a ViT costs before and after: FLOPs of a forward pass, and memory in training."""
    from .. import cost

    if hasattr(configs[0], "image_size"):
        what, memory = "an image", [cost.training_memory(config, 1).total for config in configs]
        flops = [cost.forward_flops_per_image(config) for config in configs]
    else:
        length = configs[0].max_position_embeddings
        what, memory = f"{length:,} tokens", [cost.training_memory(config, 1, length).total for config in configs]
        flops = [length * cost.forward_flops_per_token(config, length) for config in configs]
    return {
        f"FLOPs of a forward pass over {what}": " -> ".join(map(short, flops)),
        f"memory to train on {what} (AdamW, fp32)": " -> ".join(short(size, "B") for size in memory),
    }


def show_layers(record: "Adopted") -> None:
    """The table of a model's adopted layers."""
    from ..cost import layer_numbers

    rows = []
    for name in in_order(record.layers):
        layer = record.layers[name]
        error = "-" if layer["error"] is None else f"{layer['error']:.1e}"
        tokens = [f"{layer['num_tokens']:,}", f"{layer['ballast']:,}"]
        rows.append([name, layer["kind"], *tokens, f"{layer_numbers(layer) / layer['replaced']:.2f}x", error])
    show_table(COLUMNS, rows, NOTE)


def in_order(names: Iterable[str]) -> list[str]:
    """Names of modules with block 10 behind block 9; config.json has them in the order of the alphabet."""
    return sorted(names, key=lambda name: [part.zfill(9) if part.isdecimal() else part for part in name.split(".")])


def _factor(text: str) -> float:
    try:
        return float(text.removesuffix("x"))
    except ValueError:
        raise BadRequestError(f"--grow {text} was given; a factor such as 1.5x is needed") from None
