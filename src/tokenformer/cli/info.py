"""info: what presets and saved models cost, before anything is trained or loaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .summary import quiet_libraries, short, show_table

if TYPE_CHECKING:
    from ..cost import Config, LanguageConfig, VisionConfig

commands = typer.Typer()

NOTE = (
    "params, non-emb: parameters, in all and without the embedding. tokens: query, key, value / output / feed-forward. "
    "forward, training: FLOPs a token; a multiply-add is two. cache: keys and values of one sequence in 2 bytes a "
    "number. memory: an estimate for training on one sequence in fp32 with AdamW and, for TokenFormers, chunked loss. "
    "crossing: cheaper in FLOPs a token than a GPT-NeoX of as many parameters and layers from so many tokens on. "
    "vs NeoX: that one's FLOPs at this length over this model's."
)
IMAGES_NOTE = (
    "pixels: the side of an image. length: the tokens that it becomes. non-emb: without the classifier too. forward, "
    "training, memory: for one image. vs ViT: FLOPs of a ViT of as many parameters and layers over this model's."
)


@commands.command("info", epilog="Example: tokenformer info 124m 354m models/mine --length 4096")
def info_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME_OR_FOLDER", help="Presets or model folders.", show_default="all presets"),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a sequence, of language models.", show_default="each model's context"),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side of an image, of vision models.", show_default="each model's own")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Parameters, FLOPs, KV cache and training memory of presets and model folders.

    Of a folder only config.json is read; it may hold a GPT-NeoX or a ViT. Of a TokenFormer, tau and how it grew are
    shown too; of an adopted model, its layers. Without names, --length is for all presets of language, --image-size for
    all those of vision.
    """
    import json

    from ..models import PRESETS, VISION_PRESETS

    quiet_libraries()
    if not names:
        names = [*(PRESETS if image_size is None else ()), *(VISION_PRESETS if length is None else ())]
    found = {name: _describe(name, length, image_size) for name in names}
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
    for name, facts in whole.items():
        if "tau" in facts:
            tau = ", ".join(f"{role} {value:.4g}" for role, value in facts["tau"].items())
            grown = "; then ".join(facts["growth"]) or "trained at this size from the start"
            typer.echo(f"{name}: tau {tau}; {grown}")


def _describe(name: str, length: int | None, image_size: int | None) -> dict[str, Any]:
    from dataclasses import asdict

    from transformers import ViTConfig

    from .. import cost
    from ..errors import BadRequestError
    from ..growth.folder import taus
    from ..models import TokenFormerBaseConfig, TokenFormerVisionConfig, record_of
    from ..models.folder import growth_steps

    config, saved = _config(name)
    record = record_of(config)
    facts: dict[str, Any] = {"model_type": config.model_type}
    if record is not None:
        facts |= {"adopted": record.to_dict(), "adopted_layers": asdict(cost.adopted_layers(record))}
    if not isinstance(config, cost.Config):
        for option, value in (("--length", length), ("--image-size", image_size)):
            if value is not None:
                raise BadRequestError(
                    f"{name} is an adopted {config.model_type}, of which layers only are counted; leave {option} out"
                )
        return facts
    counts = cost.parameters(config)
    facts["parameters"] = {"total": counts.total, "non_embedding": counts.non_embedding, **asdict(counts)}
    if isinstance(config, TokenFormerVisionConfig | ViTConfig):
        if length is not None:
            raise BadRequestError(f"{name} takes images, and --length is for language models; give --image-size")
        facts |= _image_facts(config, image_size)
    else:
        if image_size is not None:
            raise BadRequestError(f"{name} is a language model, and --image-size is for images; give --length")
        facts |= _text_facts(config, length or config.max_position_embeddings)
    if isinstance(config, TokenFormerBaseConfig):
        facts["tokens"] = config.num_tokens
        if saved:
            facts |= {"tau": taus(config), "growth": growth_steps(config)}
    return facts


def _text_facts(config: "LanguageConfig", length: int) -> dict[str, Any]:
    from dataclasses import asdict

    from .. import cost
    from ..models import TokenFormerConfig

    memory = cost.training_memory(config, 1, length)
    facts: dict[str, Any] = {
        "length": length,
        "forward_flops_per_token": cost.forward_flops_per_token(config, length),
        "training_flops_per_token": cost.training_flops_per_token(config, length),
        "kv_cache_bytes": cost.kv_cache_bytes(config, length),
        "training_memory_bytes": {"total": memory.total, **asdict(memory)},
    }
    if isinstance(config, TokenFormerConfig):
        # null: from no length on; 0: at every length.
        facts["crossing_length"] = cost.crossing_length(config)
        facts["equal_neox_flops_ratio"] = cost.flops_ratio(config, length)
    return facts


def _image_facts(config: "VisionConfig", image_size: int | None) -> dict[str, Any]:
    from dataclasses import asdict

    from .. import cost
    from ..models import TokenFormerVisionConfig

    memory = cost.training_memory(config, 1, image_size=image_size)
    facts: dict[str, Any] = {
        "image_size": image_size or config.image_size,
        "length": cost.tokens_per_image(config, image_size),
        "forward_flops_per_image": cost.forward_flops_per_image(config, image_size),
        "training_flops_per_image": cost.training_flops_per_image(config, image_size),
        "training_memory_bytes": {"total": memory.total, **asdict(memory)},
    }
    if isinstance(config, TokenFormerVisionConfig):
        facts["equal_vit_flops_ratio"] = cost.image_flops_ratio(config, image_size)
    return facts


def _config(name: str) -> tuple["Config", bool]:
    """The configuration a name stands for, and whether it is a folder's. A preset goes before a folder of its name."""
    from .. import cost
    from ..errors import BadRequestError, did_you_mean
    from ..models import PRESETS, VISION_PRESETS, TokenFormerConfig, TokenFormerVisionConfig, record_of
    from ..models.loading import read_any_config

    if name in PRESETS:
        return TokenFormerConfig.preset(name), False
    if name in VISION_PRESETS:
        return TokenFormerVisionConfig.preset(name), False
    folder = Path(name)
    if not folder.exists():
        known = [*PRESETS, *VISION_PRESETS]
        raise BadRequestError(f"{name} is neither a preset nor a folder; {did_you_mean(name, known)}")
    config = read_any_config(folder)
    if not isinstance(config, cost.Config) and record_of(config) is None:
        raise BadRequestError(f"{folder} holds a {config.model_type} model; a tokenformer, gpt_neox or vit is needed")
    return config, True


def _show_adopted(name: str, facts: dict[str, Any]) -> None:
    from ..models import Adopted
    from .adopt import show_layers

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
