"""Token groups that are part of a model: noted in its configuration, and built with it, so that they load like weights.

Enters: a TokenFormer. Leaves: the same, with the groups of `config.token_groups` beside its layers; or a configuration
with one more of them, or one less. Groups that are saved apart are not in it; see groups/, which also has the methods
that a model gets while it has groups.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ..errors import BadRequestError
from ..pattention import Pattention
from ..pattention.groups import (
    Switch,
    TokenGroup,
    add_group,
    can_be_called,
    layers_with_groups,
    switch_of,
    take_away,
)
from .adopted import growth_records
from .config import TokenFormerBaseConfig

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class GroupMethods(NamedTuple):
    """What gives a model the methods that go with groups, and what takes them away."""

    give: Callable[[nn.Module], None]
    take: Callable[[nn.Module], None]


# Those of groups/methods.py, which fills this in, as models are imported before groups.
GROUP_METHODS: list[GroupMethods] = []


def give_methods(model: nn.Module) -> None:
    """Let a model with groups do what models with groups can."""
    for methods in GROUP_METHODS:
        methods.give(model)


def remove_group(model: nn.Module, name: str) -> None:
    """Take a group away. With the last one that is no part of the model, what groups froze can be trained again."""
    switch = switch_of(model)
    assert switch is not None
    switch.forget(name)
    for part, _ in growth_records(model):
        entries = getattr(part.config, "token_groups", None)
        if entries:
            part.config.token_groups = [entry for entry in entries if entry["name"] != name] or None
            history = part.config.growth_history or []
            part.config.growth_history = [step for step in history if step.get("group") != name] or None
    for layer, groups in list(layers_with_groups(model)):
        if name in groups:
            delattr(groups, name)
        if not groups.names():
            take_away(model.get_submodule(layer))
    thaw_if_whole(model, switch)
    if switch_of(model) is None:
        for methods in GROUP_METHODS:
            methods.take(model)


def thaw_if_whole(model: nn.Module, switch: Switch) -> None:
    """Let what groups froze be trained again, once all groups that are left are part of the model."""
    names = {name for _, groups in layers_with_groups(model) for name in groups.names()}
    if switch.held is None or names - set(kept_names(model)):
        return
    held = {id(parameter) for parameter in switch.held}
    for parameter in model.parameters():
        if id(parameter) not in held:
            parameter.requires_grad_(True)
    switch.held = None


def put_kept_groups(model: Any) -> None:
    """Put the groups that the configuration names beside the layers of a base model. All of them are on."""
    entries, switch = model.config.token_groups or [], Switch()
    for entry in entries:
        for name, count in entry["layers"].items():
            layer = model.get_submodule(name)
            assert isinstance(layer, Pattention)
            group = TokenGroup(layer.d_in, layer.d_out, count, layer.kind, entry["norm"])
            add_group(layer, entry["name"], group, switch)
        if entry["merged"]:
            switch.merged = (*switch.merged, entry["name"])
        else:
            switch.turn_on(entry["name"])


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


def check_name(model: nn.Module, name: str) -> None:
    """Refuse a name that a model has already, or that cannot be one."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadRequestError(
            f"a token group cannot be called {name!r}; use letters, digits, - and _, beginning with a letter or digit"
        )
    if not can_be_called(name):
        raise BadRequestError(f"a token group cannot be called {name!r}, a word that torch uses; choose another name")
    if any(name in groups for _, groups in layers_with_groups(model)):
        raise BadRequestError(
            f"the model has a token group {name!r} already; choose another name, or remove_tokens(model, {name!r}) "
            "first"
        )
