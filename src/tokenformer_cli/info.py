"""info: what presets and saved models cost, before anything is trained or loaded."""

import json
from typing import Annotated, Any

import typer

from .terminal import TokenFraction, TrustRemoteCode, quiet_libraries, short, show_table

commands = typer.Typer()

NOTE = (
    "params, non-emb: parameters, in all and without the embedding. tokens: query, key, value / output / feed-forward. "
    "forward, training: FLOPs per token; a multiply-add is two. cache: keys and values of one sequence in 2 bytes "
    "each. memory: an estimate for training on one sequence in fp32 with AdamW and, for TokenFormers, chunked loss. "
    "crossing: the length from which it takes fewer FLOPs per token than a GPT-NeoX of equal parameters and layers. "
    "vs NeoX: the GPT-NeoX's FLOPs at this length over this model's."
)
IMAGES_NOTE = (
    "pixels: the side of an image. length: the tokens that it becomes. non-emb: without the classifier too. forward, "
    "training, memory: for one image. vs ViT: FLOPs of a ViT with as many parameters and layers over this model's."
)


@commands.command("info", epilog="Example: tokenformer info 124m 354m models/mine --length 4096")
def info_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME_OR_FOLDER", help="Presets or model folders.", show_default="all presets"),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1, max=2**40, help="Tokens in a sequence, of language models.", show_default="each model's context"
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(min=1, max=2**20, help="Side of an image, of vision models.", show_default="each model's own"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    token_fraction: TokenFraction = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Parameters, FLOPs, KV cache and training memory of presets and model folders.

    No weights are read; a folder may also hold a GPT-NeoX or a ViT. A TokenFormer's tau and growth steps
    are shown too, and an adopted model's layers. Without names, --length is for all language presets, --image-size for
    all vision presets.
    """
    from tokenformer.models import PRESETS, VISION_PRESETS

    from .facts import describe

    quiet_libraries()
    if not names:
        names = [*(PRESETS if image_size is None else ()), *(VISION_PRESETS if length is None else ())]
    how = {"trust_remote_code": trust_remote_code, "token_fraction": token_fraction}
    found = {name: describe(name, length, image_size, **how) for name in names}  # type: ignore[arg-type]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    adopted = {name: facts for name, facts in found.items() if "adopted" in facts}
    whole = {name: facts for name, facts in found.items() if "parameters" in facts}
    texts = [_text_row(name, facts) for name, facts in whole.items() if "image_size" not in facts]
    images = [_image_row(name, facts) for name, facts in whole.items() if "image_size" in facts]
    if texts:
        columns = ["", "params", "non-emb", "tokens", "length", "forward", "training", "cache", "memory"]
        show_table([*columns, "crossing", "vs NeoX"], texts, NOTE)
    if texts and images:
        typer.echo()
    if images:
        columns = ["", "params", "non-emb", "tokens", "pixels", "length", "forward", "training", "memory", "vs ViT"]
        show_table(columns, images, IMAGES_NOTE)
    for name, facts in adopted.items():
        _show_adopted(name, facts)
    for name, facts in found.items():
        if "token_group" in facts:
            group = facts["token_group"]
            _show_group(name, {**group, "merged": False})
        for group in facts.get("token_groups", []):
            _show_group(name, group)
    for name, facts in whole.items():
        if "quantised" in facts:
            typer.echo(f"{name}: {facts['quantised']['tokens']:,} tokens are {facts['quantised']['dtype']}")
        if "tau" in facts:
            tau = ", ".join(f"{role} {value:.4g}" for role, value in facts["tau"].items())
            grown = "; then ".join(facts["growth"]) or "trained at this size from the start"
            typer.echo(f"{name}: tau {tau}; {grown}")


def _show_group(name: str, group: dict[str, Any]) -> None:
    """A token group that is part of a model, or has a folder of its own."""
    counts = list(group["layers"].values())
    size = f"{counts[0]} tokens" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)} tokens"
    base = f", of a {group['base']['model_type']} model" if "base" in group else ", merged" if group["merged"] else ""
    normaliser = "a normaliser of its own" if group["norm"] == "own" else "the base's normaliser"
    typer.echo(f"{name}: token group {group['name']}, {size} beside {len(counts)} layers, {normaliser}{base}")


def _show_adopted(name: str, facts: dict[str, Any]) -> None:
    from tokenformer.models import Adopted

    from .facts import show_layers

    costs = facts["adopted_layers"]
    numbers = " -> ".join(short(costs[f"{which}numbers"]) for which in ("replaced_", ""))
    flops = " -> ".join(short(costs[f"{which}flops_per_token"]) for which in ("replaced_", ""))
    typer.echo(f"{name}: an adopted {facts['model_type']}; in these layers numbers {numbers}, FLOPs {flops}")
    show_layers(Adopted(**facts["adopted"]))


def _text_row(name: str, facts: dict[str, Any]) -> list[str]:
    row = [
        *_first_columns(name, facts),
        f"{facts['length']:,}",
        short(facts["forward_flops_per_token"]),
        short(facts["training_flops_per_token"]),
        short(facts["kv_cache_bytes"], "B"),
        short(facts["training_memory_bytes"]["total"], "B"),
    ]
    if "crossing_length" not in facts:
        return [*row, "-", "-"]
    crossing = {None: "never", 0: "always"}.get(facts["crossing_length"]) or f"{facts['crossing_length']:,}"
    return [*row, crossing, f"{facts['equal_neox_flops_ratio']:.3f}"]


def _image_row(name: str, facts: dict[str, Any]) -> list[str]:
    ratio = facts.get("equal_vit_flops_ratio")
    return [
        *_first_columns(name, facts),
        str(facts["image_size"]),
        f"{facts['length']:,}",
        short(facts["forward_flops_per_image"]),
        short(facts["training_flops_per_image"]),
        short(facts["training_memory_bytes"]["total"], "B"),
        "-" if ratio is None else f"{ratio:.3f}",
    ]


def _first_columns(name: str, facts: dict[str, Any]) -> list[str]:
    kind = {"gpt_neox": "GPT-NeoX", "vit": "ViT"}.get(facts["model_type"], "")
    kind += ", adopted" if "adopted" in facts else ""
    tokens = "/".join(str(count) for count in facts.get("tokens", {}).values())
    counts = facts["parameters"]
    return [name, short(counts["total"]), short(counts["non_embedding"]), tokens or kind]
