"""Growth by a token group: what a step would append stands beside each layer, with a normaliser of its own.

Nothing of the base changes, and the step can be switched off. The new keys are random and the new values zero.
"""

from collections.abc import Mapping

import torch
from torch import nn

from ..errors import BadRequestError
from ..models.kept_groups import check_kept, give_methods, keep_group
from ..pattention import pattention_layers
from ..pattention.groups import Switch, TokenGroup, add_group, switch_of
from .growable import check_growable
from .layer import fill_normal, random_stream
from .plan import find_config, layers_called
from .step import GroupGrowth, Growth


def plan_group(model: nn.Module, name: str, num_tokens: Mapping[str, int], *, seed: int = 0) -> Growth:
    """A growth step by a group of so many tokens in each layer, by role."""
    check_kept(model, "a token group in training")
    check_growable(model, "zero")
    layers = dict(pattention_layers(model))
    counts: dict[str, int] = {}
    for role, count in num_tokens.items():
        if count < 1:
            raise BadRequestError(f"grow: num_tokens of {role} is {count}; at least 1 is needed")
        counts |= dict.fromkeys(layers_called(role, layers, find_config(model)), count)
    return Growth("group", seed, 0.0, {}, group=GroupGrowth(name, counts))


def as_group(growth: Growth, name: str) -> Growth:
    """The same step, with what it appends in a group."""
    if growth.depth is not None:
        raise BadRequestError("grow: as_group is given with depth; a group has tokens only, so grow in depth by itself")
    counts = {layer: step.after - step.before for layer, step in growth.layers.items()}
    return Growth("group", growth.seed, 0.0, {}, group=GroupGrowth(name, counts))


@torch.no_grad()
def grow_group(model: nn.Module, growth: Growth) -> None:
    """Put the group of a step beside the layers of a model, in place, as part of the model. It is on."""
    group = growth.group
    assert group is not None
    check_kept(model, "growth by a token group")
    switch = switch_of(model) or Switch()
    for name, layer in pattention_layers(model):
        if name not in group.layers:
            continue
        tokens = layer.key_tokens
        new = TokenGroup(
            *(layer.d_in, layer.d_out, group.layers[name], layer.kind, "own"),
            device=tokens.device,
            dtype=tokens.dtype,
        )
        if not tokens.is_meta:
            fill_normal(new.key_tokens, layer.d_in**-0.5, random_stream(growth.seed, f"{name}/{group.name}"))
        add_group(layer, group.name, new, switch)
    switch.turn_on(group.name)
    keep_group(model, group.name, merged=False, what="growth by a token group")
    give_methods(model)
