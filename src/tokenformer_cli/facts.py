"""What commands say about a model from its configuration alone: parameters, FLOPs, memory, tau, tokens, adopted layers.

Enters: the name of a preset or a folder, a configuration, or an adopted model's record. Leaves: numbers for --json, or
rows and tables of text.
"""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import ViTConfig

from tokenformer import cost
from tokenformer.errors import BadRequestError, did_you_mean
from tokenformer.groups.files import CONFIG_FILE, read_facts
from tokenformer.growth.grow_folder import taus
from tokenformer.models import (
    PRESETS,
    VISION_PRESETS,
    Adopted,
    TokenFormerBaseConfig,
    TokenFormerConfig,
    TokenFormerVisionConfig,
    record_of,
)
from tokenformer.models.card import growth_steps
from tokenformer.models.loading import integers_in, read_config
from tokenformer.models.prefixes import prefix_config

from .terminal import short, show_table

LAYER_COLUMNS = ["layer", "kind", "tokens", "ballast", "numbers", "error"]
LAYERS_NOTE = (
    "tokens: parameter tokens. ballast: how many of them were there at adoption to keep the norm constant. numbers: in "
    "keys and values, over those in the replaced matrices. error: at adoption, relative to the largest output."
)


def describe(
    name: str,
    length: int | None,
    image_size: int | None,
    *,
    trust_remote_code: bool = False,
    token_fraction: float | None = None,
) -> dict[str, Any]:
    """Everything `tokenformer info` knows about a preset or a folder, as --json prints it."""
    if (Path(name) / CONFIG_FILE).is_file():
        return {"token_group": read_facts(Path(name))}
    config, saved = _config(name, trust_remote_code)
    if token_fraction is not None:
        config = prefix_config(config, token_fraction, name)
    record = record_of(config)
    facts: dict[str, Any] = {"model_type": config.model_type}
    if record is not None:
        facts |= {"adopted": record.to_dict(), "adopted_layers": asdict(cost.adopted_layers(record))}
    if not isinstance(config, cost.Config):
        for option, value in (("--length", length), ("--image-size", image_size)):
            if value is not None:
                raise BadRequestError(
                    f"{name} is an adopted {config.model_type}, of which only layers are counted; leave {option} out"
                )
        return facts
    counts = cost.parameters(config)
    facts["parameters"] = {"total": counts.total, "non_embedding": counts.non_embedding, **asdict(counts)}
    if isinstance(config, TokenFormerVisionConfig | ViTConfig):
        if length is not None:
            raise BadRequestError(f"{name} takes images, and --length is for language models; use --image-size")
        facts |= _image_facts(config, image_size)
    else:
        if image_size is not None:
            raise BadRequestError(f"{name} is a language model, and --image-size is for images; use --length")
        facts |= _text_facts(config, length or config.max_position_embeddings)
    if isinstance(config, TokenFormerBaseConfig):
        facts["tokens"] = config.num_tokens
        if config.token_groups:
            facts["token_groups"] = config.token_groups
        if saved:
            facts |= {"tau": taus(config), "growth": growth_steps(config)}
            facts |= _quantised(config)
    return facts


def _quantised(config: TokenFormerBaseConfig) -> dict[str, Any]:
    """How many tokens of a saved model are integers, and of how many bits; nothing if none are."""
    settings = integers_in(config)
    if settings is None:
        return {}
    return {"quantised": {"dtype": settings["dtype"], "tokens": sum(settings["layers"].values())}}


def _text_facts(config: cost.LanguageConfig, length: int) -> dict[str, Any]:
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


def _image_facts(config: cost.VisionConfig, image_size: int | None) -> dict[str, Any]:
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


def _config(name: str, trust_remote_code: bool) -> tuple[cost.Config, bool]:
    """The configuration of that name, and whether it is a folder's. Presets take precedence over folders."""
    if name in PRESETS:
        return TokenFormerConfig.preset(name), False
    if name in VISION_PRESETS:
        return TokenFormerVisionConfig.preset(name), False
    folder = Path(name)
    if not folder.exists():
        known = [*PRESETS, *VISION_PRESETS]
        raise BadRequestError(f"{name} is neither a preset nor a folder; {did_you_mean(name, known)}")
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if not isinstance(config, cost.Config) and record_of(config) is None:
        raise BadRequestError(f"{folder} holds a {config.model_type} model; a tokenformer, gpt_neox or vit is needed")
    return config, True


def growth_rows(config: Any) -> dict[str, str]:
    """What growth changes: counts of tokens, blocks and parameters, tau and FLOPs."""
    record = record_of(config)
    if record is not None:
        costs = cost.adopted_layers(record)
        return {
            "blocks": f"{config.num_hidden_layers:,}",
            **{f"tokens, {name}": f"{record.layers[name]['num_tokens']:,}" for name in in_order(record.layers)},
            "parameters in these layers": f"{costs.parameters:,}",
            "FLOPs per token in these layers": short(costs.flops_per_token),
        }
    if isinstance(config, TokenFormerVisionConfig):
        flops = {f"FLOPs per image of {config.image_size} pixels": short(cost.forward_flops_per_image(config))}
    else:
        length = config.max_position_embeddings
        flops = {f"FLOPs per token at length {length:,}": short(cost.forward_flops_per_token(config, length))}
    return {
        "parameters": f"{cost.parameters(config).total:,}",
        "blocks": f"{config.num_hidden_layers:,}",
        **{f"tokens, {role}": f"{count:,}" for role, count in config.num_tokens.items()},
        **{f"tau, {role}": f"{tau:.4g}" for role, tau in taus(config).items()},
        **flops,
    }


def whole_model_rows(*configs: Any) -> dict[str, str]:
    """What a GPT-NeoX or a ViT costs before and after: FLOPs of a forward pass, and memory in training."""
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


def show_layers(record: Adopted) -> None:
    """The table of a model's adopted layers."""
    rows = []
    for name in in_order(record.layers):
        layer = record.layers[name]
        error = "-" if layer["error"] is None else f"{layer['error']:.1e}"
        tokens = [f"{layer['num_tokens']:,}", f"{layer['ballast']:,}"]
        rows.append([name, layer["kind"], *tokens, f"{cost.layer_numbers(layer) / layer['replaced']:.2f}x", error])
    show_table(LAYER_COLUMNS, rows, LAYERS_NOTE)


def in_order(names: Iterable[str]) -> list[str]:
    """Names of modules with block 10 after block 9; config.json sorts them alphabetically."""
    return sorted(names, key=lambda name: [part.zfill(9) if part.isdecimal() else part for part in name.split(".")])
