"""info: what presets and saved models cost, before anything is trained or loaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .summary import quiet_libraries, short, show_table

if TYPE_CHECKING:
    from ..cost import Config

commands = typer.Typer()

NOTE = (
    "params, non-emb: parameters, in all and without the embedding. tokens: query, key, value / output / feed-forward. "
    "forward, training: FLOPs a token; a multiply-add is two. cache: keys and values of one sequence in 2 bytes a "
    "number. memory: an estimate for training on one sequence in fp32 with AdamW and, for TokenFormers, chunked loss. "
    "crossing: cheaper in FLOPs a token than a GPT-NeoX of as many parameters and layers from so many tokens on. "
    "vs NeoX: that one's FLOPs at this length over this model's."
)


@commands.command("info", epilog="Example: tokenformer info 124m 354m models/mine --length 4096")
def info_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME_OR_FOLDER", help="Presets or model folders.", show_default="all presets"),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a sequence.", show_default="each model's context")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Parameters, FLOPs, KV cache and training memory of presets and model folders.

    Of a folder only config.json is read; it may hold a GPT-NeoX. Of a TokenFormer, tau and how it grew are shown too;
    of an adopted model, its layers.
    """
    import json

    from ..models import PRESETS, Adopted
    from .adopt import show_layers

    quiet_libraries()
    found = {name: _describe(name, length) for name in names or PRESETS}
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    adopted = {name: facts for name, facts in found.items() if "adopted" in facts}
    whole = {name: facts for name, facts in found.items() if name not in adopted}
    columns = ["", "params", "non-emb", "tokens", "length", "forward", "training", "cache", "memory"]
    columns += ["crossing", "vs NeoX"]
    if whole:
        show_table(columns, [_row(name, facts) for name, facts in whole.items()], NOTE)
    for name, facts in adopted.items():
        costs = facts["adopted_layers"]
        numbers = " -> ".join(short(costs[f"{which}parameters"]) for which in ("replaced_", ""))
        flops = " -> ".join(short(costs[f"{which}flops_per_token"]) for which in ("replaced_", ""))
        typer.echo(f"{name}: an adopted {facts['model_type']}; in these layers parameters {numbers}, FLOPs {flops}")
        show_layers(Adopted(**facts["adopted"]))
    for name, facts in whole.items():
        if "tau" in facts:
            tau = ", ".join(f"{role} {value:.4g}" for role, value in facts["tau"].items())
            grown = "; then ".join(facts["growth"]) or "trained at this size from the start"
            typer.echo(f"{name}: tau {tau}; {grown}")


def _describe(name: str, length: int | None) -> dict[str, Any]:
    from dataclasses import asdict

    from .. import cost
    from ..growth.folder import taus
    from ..models import TokenFormerConfig, record_of
    from ..models.folder import growth_steps

    config, saved = _config(name)
    record = record_of(config)
    if record is not None:
        costs = asdict(cost.adopted_layers(record))
        return {"model_type": config.model_type, "adopted": record.to_dict(), "adopted_layers": costs}
    length = length or config.max_position_embeddings
    counts, memory = cost.parameters(config), cost.training_memory(config, 1, length)
    facts = {
        "model_type": config.model_type,
        "parameters": {"total": counts.total, "non_embedding": counts.non_embedding, **asdict(counts)},
        "length": length,
        "forward_flops_per_token": cost.forward_flops_per_token(config, length),
        "training_flops_per_token": cost.training_flops_per_token(config, length),
        "kv_cache_bytes": cost.kv_cache_bytes(config, length),
        "training_memory_bytes": {"total": memory.total, **asdict(memory)},
    }
    if isinstance(config, TokenFormerConfig):
        facts["tokens"] = config.num_tokens
        # null: from no length on; 0: at every length.
        facts["crossing_length"] = cost.crossing_length(config)
        facts["equal_neox_flops_ratio"] = cost.flops_ratio(config, length)
        if saved:
            facts |= {"tau": taus(config), "growth": growth_steps(config)}
    return facts


def _config(name: str) -> tuple["Config", bool]:
    """The configuration a name stands for, and whether it is a folder's. A preset goes before a folder of its name."""
    from transformers import GPTNeoXConfig

    from ..errors import BadRequestError, did_you_mean
    from ..models import PRESETS, TokenFormerConfig, record_of
    from ..models.loading import read_any_config

    if name in PRESETS:
        return TokenFormerConfig.preset(name), False
    folder = Path(name)
    if not folder.exists():
        raise BadRequestError(f"{name} is neither a preset nor a folder; {did_you_mean(name, PRESETS)}")
    config = read_any_config(folder)
    if not isinstance(config, TokenFormerConfig | GPTNeoXConfig) and record_of(config) is None:
        raise BadRequestError(f"{folder} holds a {config.model_type} model; a tokenformer or a gpt_neox is needed")
    return config, True


def _row(name: str, facts: dict[str, Any]) -> list[str]:
    row = [
        name,
        short(facts["parameters"]["total"]),
        short(facts["parameters"]["non_embedding"]),
        "/".join(str(count) for count in facts["tokens"].values()) if "tokens" in facts else "GPT-NeoX",
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
