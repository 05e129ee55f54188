"""Any size from one file: the first tokens of every layer, where the tokens are in an order of use.

Enters: the record `config.token_prefixes`, which says of every layer, by its name in the base model, what tau is of its
first so many tokens; a share of the tokens; and a folder. Leaves: the configuration of the smaller model, and of the
folder's weights no more than it needs, as slices of safetensors.

The record is written where an order comes about: by `sort_tokens` and by training with `nested` prefixes. Between the
counts that it names, and below them, tau² is linear in the count, as if each token had the same share of the norm; with
softmax, tau is. Exact growth appends tokens, and what was recorded still holds.
"""

import copy
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ..errors import BadFileError, BadRequestError
from ..pattention import TOKENS, Pattention, default_tau, pattention_layers
from ..pattention.module import Prefix
from ..pattention.sizes import Sizes, offer
from .blocks import BlockGrowth

# By layer, by count: tau. JSON has words for keys.
Prefixes = dict[str, dict[str, float]]
# Files with weights, and which tensors are read from each; None for all.
Files = Iterable[tuple[str, list[str] | None]]
# At which shares of a sorted layer's tokens its taus are recorded.
SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)
# Steps of growth after which the first tokens are what they were.
APPENDING = ("zero", "rotate", "random", "group")
# What from_pretrained passes on to find a file.
HUB_KEYS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

logger = logging.getLogger(__name__)


def check_fraction(fraction: Any, given: str = "token_fraction") -> None:
    """Refuse what is not a share of the tokens."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise BadRequestError(f"{given}={fraction!r} was given; a number above 0 and at most 1 is needed")


def check_prefixes(config: Any, fraction: float, folder: Any, given: str = "token_fraction") -> None:
    """Refuse a share of a model whose tokens have no order of use, or cannot be divided."""
    check_fraction(fraction, given)
    said = f"{given}={fraction} was given, and"
    if not hasattr(config, "token_prefixes"):
        raise BadRequestError(
            f"{said} {folder} holds a {config.model_type} model that is no TokenFormer; make it smaller with "
            "tokenformer shrink"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise BadRequestError(
            f"{said} the tokens in {folder} are quantised; load the share from the folder that it was made from, and "
            "quantize that"
        )
    if config.token_prefixes is None:
        raise BadRequestError(
            f"{said} the tokens in {folder} are not sorted; sort them: tokenformer sort MODEL OUT --text FILE, or "
            "sort_tokens(model, rank_tokens(model, batches)) and save_pretrained"
        )


def prefix_count(num_tokens: int, fraction: float) -> int:
    """How many tokens that share is: rounded, and at least one."""
    return max(1, round(num_tokens * fraction))


def resized(config: Any, fraction: float) -> Any:
    """A copy of a configuration with a share of the tokens."""
    small = copy.deepcopy(config)
    for role, count in config.num_tokens.items():
        setattr(small, f"{role}_tokens", prefix_count(count, fraction))
    return small


def prefix_tau(points: Mapping[str, float], count: int, kind: str) -> float:
    """The tau of a layer's first `count` tokens, from what is recorded of it."""
    if str(count) in points:
        return points[str(count)]
    power = 1 if kind == "softmax" else 2
    below, height = 0, 0.0
    for known, tau in sorted((int(known), tau**power) for known, tau in points.items()):
        if known > count:
            return float((height + (tau - height) * (count - below) / (known - below)) ** (1 / power))
        below, height = known, tau
    raise ValueError(f"{count} tokens are more than the {below} that are recorded")


def after_growth(prefixes: Prefixes | None, step: Mapping[str, Any], stack: str) -> Prefixes | None:
    """The record after a growth step: None where the first tokens are no longer what they were."""
    deeper = BlockGrowth(**step["blocks"]) if "blocks" in step else None
    appended = step["method"] in APPENDING or (step["before"] == step["after"] and step["method"] != "sort")
    if not prefixes or not appended:
        return None
    if deeper is None:
        return prefixes
    moved: Prefixes = {}
    for place, (old, _) in enumerate(deeper.origins):
        for name, points in prefixes.items():
            if name.startswith(f"{stack}.{old}."):
                moved[name.replace(f"{stack}.{old}.", f"{stack}.{place}.", 1)] = dict(points)
    return moved


def before_growth(prefixes: Prefixes | None, step: Mapping[str, Any], roles: Mapping[str, tuple]) -> Prefixes | None:
    """The record once a growth step is taken back. Which blocks were there before, it does not say."""
    if not prefixes or "blocks" in step:
        return None
    most = {last: step["before"][role] for role, names in roles.items() for last in names}
    return {
        name: {count: tau for count, tau in points.items() if int(count) <= most[name.rpartition(".")[2]]}
        for name, points in prefixes.items()
    }


def record_taus(base: nn.Module, taus: Mapping[str, Mapping[int, float]]) -> None:
    """Note in the configuration of a base model, by layer, what tau is of its first so many tokens."""
    config: Any = base.config
    config.token_prefixes = {
        name: {str(count): round(tau, 6) for count, tau in sorted(points.items())} for name, points in taus.items()
    }


def known_points(config: Any, name: str, layer: Pattention) -> dict[str, float]:
    """What is recorded of a layer, and the tau that it has with all tokens."""
    recorded = (config.token_prefixes or {}).get(name, {})
    return {**recorded, str(layer.num_tokens): layer.tau.item()}


def prefix_config(config: Any, fraction: float, folder: Any, whole_taus: Mapping[str, float] | None = None) -> Any:
    """The configuration of the first tokens of every layer, or a one-line error if their order says nothing.

    whole_taus: of every layer with all its tokens, as the weights have it; at birth's unless given.
    """
    check_prefixes(config, fraction, folder)
    small, before = resized(config, fraction), dict(config.num_tokens)
    after = dict(small.num_tokens)
    if after == before:
        return small
    rounded = [f"{role} {n} of {before[role]}" for role, n in after.items() if n != before[role] * fraction]
    if rounded:
        logger.warning(f"token_fraction={fraction} is rounded to whole tokens: {', '.join(rounded)}")
    small.token_prefixes, factors = {}, dict[str, list[float]]()
    for name, points in config.token_prefixes.items():
        last = name.rpartition(".")[2]
        role = next(role for role, names in config.token_roles.items() if last in names)
        at_birth = points.get(str(before[role]), default_tau(before[role], config.pattention_kind))
        whole_tau = (whole_taus or {}).get(name, at_birth)
        tau = prefix_tau({**points, str(before[role]): whole_tau}, after[role], config.pattention_kind)
        factors.setdefault(last, []).append(math.log(tau / whole_tau))
        small.token_prefixes[name] = {k: v for k, v in points.items() if int(k) < after[role]} | {str(after[role]): tau}
    mean = {last: math.exp(sum(logs) / len(logs)) for last, logs in factors.items()}
    step = {"method": "shrink", "seed": 0, "noise": 0.0, "tau_factors": mean, "before": before, "after": after}
    small.growth_history = [*(config.growth_history or []), step]
    return small


def prefix_arguments(
    kind: Any, fraction: float, folder: Any, *args: Any, config: Any = None, **options: Any
) -> tuple[tuple, dict[str, Any]]:
    """What transformers' from_pretrained is given instead, to build the first tokens of a folder's model."""
    check_fraction(fraction)
    for option in ("state_dict", "quantization_config", "gguf_file", "variant"):
        if options.get(option) is not None:
            raise BadRequestError(f"token_fraction and {option} were given; load with one of them")
    hub = {key: options.pop(key) for key in HUB_KEYS if options.get(key) is not None}
    if not hasattr(config, "to_dict"):
        config = kind.config_class.from_pretrained(config or folder, **hub)
    prefix_config(config, fraction, folder)  # which may refuse, before a weight is read
    files = _weight_files(folder, hub)
    small = prefix_config(config, fraction, folder, dict(_read_taus(files)))
    tensors = dict(_read_prefix(files, config, small))
    given = {"config": small, "state_dict": tensors}
    settings = cached_file(folder, "generation_config.json", _raise_exceptions_for_missing_entries=False, **hub)
    if kind.can_generate() and settings is not None:
        given["generation_config"] = GenerationConfig.from_pretrained(Path(settings).parent)
    return (None, *args), {**options, **given}


def _read_taus(files: Files) -> Iterator[tuple[str, float]]:
    for file, names in files:
        with safe_open(file, framework="pt") as weights:
            for name in names or weights.keys():
                if name.endswith(".tau"):
                    yield name.removeprefix("model.").removesuffix(".tau"), weights.get_tensor(name).item()


def _read_prefix(files: Files, config: Any, small: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the smaller model: of key and value tokens the first rows alone are read."""
    counts = {name: max(map(int, points)) for name, points in small.token_prefixes.items()}
    for file, names in files:
        with safe_open(file, framework="pt") as weights:
            for name in names or weights.keys():
                layer, _, last = name.removeprefix("model.").rpartition(".")
                if layer not in counts or small.num_tokens == config.num_tokens:
                    yield name, weights.get_tensor(name)
                elif last == "tau":
                    tau = small.token_prefixes[layer][str(counts[layer])]
                    yield name, torch.tensor(tau, dtype=weights.get_tensor(name).dtype)
                elif last in TOKENS:
                    yield name, weights.get_slice(name)[: counts[layer]]
                else:
                    yield name, weights.get_tensor(name)


def _weight_files(folder: Any, hub: Mapping[str, Any]) -> Files:
    """The files with a model's weights, and which tensors are to be read from each; None for all."""
    if isinstance(folder, str | Path) and Path(folder).exists() and not Path(folder).is_dir():
        raise BadRequestError(f"{folder} is a file; give the model's folder")
    find = {"_raise_exceptions_for_missing_entries": False, **hub}
    file = cached_file(folder, SAFE_WEIGHTS_NAME, **find)
    if file is not None:
        return [(file, None)]
    index = cached_file(folder, SAFE_WEIGHTS_INDEX_NAME, **find)
    if index is None:
        raise BadFileError(f"{folder} has no {SAFE_WEIGHTS_NAME}, of which a part can be read; save the model again")
    places = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    files: dict[str, list[str]] = {}
    for name, shard in places.items():
        files.setdefault(shard, []).append(name)
    return [(str(cached_file(folder, shard, **hub)), names) for shard, names in files.items()]


def offer_sizes(model: Any, fractions: Iterable[float]) -> Sizes:
    """Let a model in memory compute each sequence with one of these shares of its tokens, which are views of them."""
    base, fractions = model.base_model, list(fractions)
    for fraction in fractions:
        check_prefixes(base.config, fraction, "the model", "size")
    prefixes = {fraction: dict[str, Prefix]() for fraction in fractions}
    for name, layer in pattention_layers(base):
        points = known_points(base.config, name, layer)
        for fraction in fractions:
            count = prefix_count(layer.num_tokens, fraction)
            prefixes[fraction][name] = Prefix(count, prefix_tau(points, count, layer.kind) / layer.tau.item())
    return offer(base, prefixes)


def nested_points(model: nn.Module, fractions: Iterable[float]) -> dict[str, dict[int, float]]:
    """By layer of a base model, the counts that these shares are, and the tau of each."""
    config: Any = model.config
    found = {}
    for name, layer in pattention_layers(model):
        points, counts = known_points(config, name, layer), [prefix_count(layer.num_tokens, f) for f in fractions]
        found[name] = {count: prefix_tau(points, count, layer.kind) for count in counts}
    return found
