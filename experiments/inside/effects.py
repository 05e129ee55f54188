"""How many units carry a logit: direct effects by way of the final norm, and what is lost without a unit.

Enters: a model and text. Leaves: for positions of it how many units make up 90 % of all effects, taken without sign, on
the logit of the likeliest byte; and how many effects there were.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer import ablate, attribute

from .units import FFN, OUT, QKV, ballast_of, row_places, token_places

SHARE = 0.9


def carrying(effects: Tensor) -> Tensor:
    """How many of the effects [..., units] make up 90 % of the sum of their sizes: [...]."""
    sizes = effects.abs().sort(dim=-1, descending=True).values
    return (sizes.cumsum(-1) < SHARE * sizes.sum(-1, keepdim=True)).sum(-1) + 1


def direct(model: Any, ids: Tensor) -> dict[str, dict[str, Any]]:
    """By role, of what writes to the stream: how many units there are, and how many carry 90 % at each position."""
    layers = range(model.config.num_hidden_layers)
    by_role = {role: [writer(model, role, layer) for layer in layers] for role in (OUT, FFN)}
    counts: dict[str, list[Tensor]] = {OUT: [], FFN: [], "both": []}
    units = {}
    for batch in ids.split(8):
        effects = attribute(model, batch, layers=[name for names in by_role.values() for name in names])
        parts = {role: torch.cat([effects[name] for name in names], dim=-1) for role, names in by_role.items()}
        parts["both"] = torch.cat(list(parts.values()), dim=-1)
        for role, found in parts.items():
            counts[role].append(carrying(found).flatten())
            units[role] = int((found != 0).flatten(0, -2).any(0).sum())  # without ballast
    return {role: {"units": units[role], "carry": torch.cat(found).float()} for role, found in counts.items()}


def writer(model: Any, role: str, layer: int) -> str:
    """What writes to the stream: of a linear layer the units are its inputs."""
    ours = {role: name for name, role in token_places(model, layer).items()}
    return ours.get(role, f"gpt_neox.layers.{layer}.attention.dense")


@torch.no_grad()
def ablated(model: Any, ids: Tensor) -> dict[str, dict[str, Any]]:
    """By role: how many units carry 90 % of what is lost from the logit of the likeliest byte behind each row of ids.

    Every unit is taken away by itself; others do what they did, also those with which it shares a normaliser.
    """
    whole = _last(model, ids)
    target = whole.argmax(-1, keepdim=True)
    lost: dict[str, list[Tensor]] = {QKV: [], OUT: [], FFN: []}
    for role, without in _takings(model):
        with without:
            lost[role].append((whole - _last(model, ids)).gather(-1, target))
    parts = {role: torch.cat(found, dim=-1) for role, found in lost.items()}
    parts["all"] = torch.cat(list(parts.values()), dim=-1)
    return {role: {"units": found.shape[-1], "carry": carrying(found).float()} for role, found in parts.items()}


def _last(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]


def _takings(model: Any) -> Iterator[tuple[str, Any]]:
    """For every unit its role, and a context in which it is gone."""
    for layer in range(model.config.num_hidden_layers):
        for name, role in token_places(model, layer).items():
            module = model.get_submodule(name)
            is_linear = isinstance(module, nn.Linear)
            for unit in (~ballast_of(model, name)).nonzero().flatten().tolist():
                yield role, ablate(model, {name: [unit]}, keep_norm=not is_linear)
        for name, role in row_places(model, layer).items():
            module = model.get_submodule(name)
            for unit in range(module.out_features):
                yield role, _without_row(module, unit)


@contextmanager
def _without_row(linear: nn.Module, row: int) -> Iterator[None]:
    """A linear layer that puts out zero there."""

    def zeroed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.index_fill(-1, torch.tensor([row]), 0)

    hook = linear.register_forward_hook(zeroed)
    try:
        yield
    finally:
        hook.remove()
