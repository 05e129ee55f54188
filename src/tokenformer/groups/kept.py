"""Groups that are part of a TokenFormer: a growth step that can be switched off, and what merging makes permanent.

Enters: a model, and a planned growth step or the name of a group. Leaves: the model with the groups noted in its
configuration, so that `save_pretrained` and `from_pretrained` carry them like all other weights.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import BadRequestError
from ..growth import Growth
from ..growth.layer import fill_normal, random_stream
from ..models import TokenFormerBaseConfig, growth_records
from ..pattention import pattention_layers
from ..pattention.groups import Switch, TokenGroup, add_group, layers_with_groups
from .model_class import give_methods, switch_of


def kept_names(model: nn.Module) -> list[str]:
    """The groups that are part of a model."""
    entries = (getattr(getattr(part, "config", None), "token_groups", None) for part, _ in growth_records(model))
    return [entry["name"] for found in entries for entry in found or []]


def keep_group(model: nn.Module, name: str, *, merged: bool, what: str) -> None:
    """Note a group in the configuration of the TokenFormer that it belongs to."""
    part, config = _the_tokenformer(model, what)
    groups = {layer: each[name] for layer, each in layers_with_groups(part.base_model) if name in each}
    entry = {
        "name": name,
        "norm": next(iter(groups.values())).norm,
        "layers": {layer: group.num_tokens for layer, group in groups.items()},
        "merged": merged,
    }
    others = [one for one in config.token_groups or [] if one["name"] != name]
    config.token_groups = [*others, entry]


def forget_group(model: nn.Module, name: str) -> None:
    """Take a group out of the configuration."""
    for part, _ in growth_records(model):
        entries = getattr(part.config, "token_groups", None)
        if entries:
            part.config.token_groups = [entry for entry in entries if entry["name"] != name] or None


def check_kept(model: nn.Module, what: str) -> None:
    """Refuse a model whose configuration has no room for groups."""
    _the_tokenformer(model, what)


def _the_tokenformer(model: nn.Module, what: str) -> tuple[PreTrainedModel, TokenFormerBaseConfig]:
    records = growth_records(model)
    if len(records) == 1 and isinstance(records[0][1], TokenFormerBaseConfig):
        return records[0]  # type: ignore[return-value]
    raise BadRequestError(
        f"{what} needs a TokenFormer, whose configuration says which groups it has; of a {type(model).__name__} save "
        "the group with save_tokens"
    )


@torch.no_grad()
def grow_as_group(model: nn.Module, growth: Growth, name: str) -> None:
    """Put what a growth step would append into a group, in place: off, the model is what it was."""
    switch = switch_of(model) or Switch()
    for layer, module in pattention_layers(model):
        step = growth.layers.get(layer)
        if step is not None:
            tokens = module.key_tokens
            group = TokenGroup(
                *(module.d_in, module.d_out, step.after - step.before, module.kind, "own"),
                device=tokens.device,
                dtype=tokens.dtype,
            )
            if not tokens.is_meta:
                fill_normal(group.key_tokens, module.d_in**-0.5, random_stream(growth.seed, f"{layer}/{name}"))
            add_group(module, name, group, switch)
    switch.on = (*switch.on, name)
    keep_group(model, name, merged=False, what="as_group")
    if isinstance(model, PreTrainedModel):
        give_methods(model)
