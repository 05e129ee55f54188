"""add_tokens, use_tokens, train_tokens, merge_tokens, remove_tokens: the token groups of a model in memory.

Enters: any torch model. Leaves: the same model, changed in place; or a one-line error, with nothing changed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import BadRequestError, did_you_mean
from ..growth.layer import fill_normal, random_stream, replace_data, rms
from ..models import TokenFormerBaseConfig, growth_records
from ..models.kept_groups import (
    check_kept,
    check_name,
    give_methods,
    keep_group,
    kept_names,
    remove_group,
    thaw_if_whole,
)
from ..pattention import Pattention, pattention_layers
from ..pattention.functional import ACTIVATIONS
from ..pattention.groups import (
    NORMS,
    Norm,
    Switch,
    TokenGroup,
    add_group,
    layers_with_groups,
    switch_of,
)
from .places import Place, asked_for, device_of, places, refuse_identities


@dataclass(frozen=True)
class GroupFacts:
    """One group of a model.

    trains: whether it learns. kept: whether it is part of the model, and saved with it. merged: and is always on.
    layers: how many tokens it has in each, by name.
    """

    name: str
    norm: str
    on: bool
    trains: bool
    kept: bool
    merged: bool
    layers: dict[str, int]
    parameters: int


def token_groups(model: nn.Module) -> list[GroupFacts]:
    """The groups of a model, the oldest first."""
    found: dict[str, dict[str, TokenGroup]] = {}
    switch, kept = switch_of(model) or Switch(), kept_names(model)
    for layer, groups in layers_with_groups(model):
        for name in groups.names():
            found.setdefault(name, {})[layer] = groups[name]
    return [
        GroupFacts(
            name,
            next(iter(parts.values())).norm,
            name in (*switch.on, *switch.merged),
            any(p.requires_grad for part in parts.values() for p in part.parameters()),
            name in kept,
            name in switch.merged,
            {layer: part.num_tokens for layer, part in parts.items()},
            sum(p.numel() for part in parts.values() for p in part.parameters()),
        )
        for name, parts in found.items()
    ]


def add_tokens(
    model: nn.Module,
    name: str,
    num_tokens: int | Mapping[str, int],
    *,
    where: str | Iterable[str] | None = None,
    norm: str = "own",
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Put a new group of tokens beside layers of a model, in place, and freeze all else, so that it alone learns.

    It changes nothing that the model computes until it has learnt something, and it is on, with those that were.

    Args:
        model: any model of torch. Its weights are not touched, whatever their dtype, also if they are quantised.
        name: what the group is called: letters, digits, - and _.
        num_tokens: how many tokens it has in each layer; or by role, name or pattern, in place of `where`.
        where: ffn (or mlp: the feed-forward networks), qkv, out, attention, all, or names or patterns of modules; ffn
            unless given.
        norm: own, a normaliser of its own; or shared, that of the base, for Pattentions only: as if the base had grown.
        seed: decides the new keys; with a shared normaliser the new values.
        dtype: of the group; fp32 unless given, or fp64 if the layer has it.
    """
    wanted = _wanted(model, num_tokens, where)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise BadRequestError(
            f"add_tokens: dtype={dtype!r} was given; a floating-point one is needed, as torch.bfloat16"
        )
    _check_new(model, name, norm, wanted)
    switch = switch_of(model) or Switch()
    for layer, (place, count) in wanted.items():
        group = _new_group(model.get_submodule(layer), place, count, norm, dtype)
        _draw(group, model.get_submodule(layer), random_stream(seed, f"{layer}/{name}"))
        put_group(model, layer, name, group, switch)
    return train_tokens(model, name)


def _wanted(
    model: nn.Module, num_tokens: int | Mapping[str, int], where: str | Iterable[str] | None
) -> dict[str, tuple[Place, int]]:
    """The layers, each with its number of tokens."""
    if isinstance(num_tokens, Mapping):
        if where is not None:
            raise BadRequestError("add_tokens: num_tokens names layers, and where is given too; leave one of them out")
        if not num_tokens:
            raise BadRequestError("add_tokens: num_tokens is empty; give a number, or numbers by layer")
        asked = dict(num_tokens)
    else:
        asked = dict.fromkeys(["ffn"] if where is None else asked_for(where), num_tokens)
    wanted: dict[str, tuple[Place, int]] = {}
    for one, count in asked.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise BadRequestError(f"add_tokens: num_tokens={count!r} was given; a whole number of at least 1 is needed")
        wanted |= {layer: (place, count) for layer, place in places(model, one).items()}
    refuse_identities(model, wanted)
    return wanted


def _check_new(model: nn.Module, name: str, norm: str, wanted: Mapping[str, tuple[Place, int]]) -> None:
    check_name(model, name)
    check_free_of_adapters(model)
    if norm not in NORMS:
        raise BadRequestError(f"add_tokens: norm={norm!r} is not known; {did_you_mean(norm, NORMS)}")
    if norm == "shared":
        for layer, (place, _) in wanted.items():
            check_shares(layer, model.get_submodule(layer), place.kind)


def check_shares(layer: str, module: nn.Module, kind: str) -> None:
    """Refuse a shared normaliser where there is none to share, or where silent keys would not be exact."""
    if not isinstance(module, Pattention) or kind not in (*ACTIVATIONS, "gelu_l2"):
        what = f"is a Pattention of kind {kind}" if isinstance(module, Pattention) else f"is a {type(module).__name__}"
        raise BadRequestError(f"norm='shared' needs a Pattention with an L2 norm, and {layer!r} {what}; use norm='own'")


def check_free_of_adapters(model: nn.Module) -> None:
    """Refuse a model with peft's adapters: which of the two is frozen, saved and switched would be anyone's guess."""
    named = model.named_modules()
    if any(hasattr(module, "base_layer") and hasattr(module, "active_adapters") for _, module in named):
        raise BadRequestError(
            "the model has adapters of peft, and token groups do not go on top of them; merge_and_unload() them first"
        )


def _new_group(module: nn.Module, place: Place, count: int, norm: str, dtype: torch.dtype | None) -> TokenGroup:
    first = next(module.parameters(), None)
    own = torch.float64 if first is not None and first.dtype == torch.float64 else torch.float32
    how: Norm = "shared" if norm == "shared" else "own"
    return TokenGroup(place.d_in, place.d_out, count, place.kind, how, device=device_of(module), dtype=dtype or own)


@torch.no_grad()
def _draw(group: TokenGroup, module: nn.Module, generator: torch.Generator) -> None:
    """Give a group the keys that its seed decides, or values if its keys are zero, of the size of the base's."""
    if group.key_tokens.is_meta:
        return
    if group.norm == "own":
        fill_normal(group.key_tokens, group.key_tokens.shape[1] ** -0.5, generator)
    else:
        assert isinstance(module, Pattention)
        fill_normal(group.value_tokens, rms(module.all_tokens()[1]), generator)


def put_group(model: nn.Module, layer: str, name: str, group: TokenGroup, switch: Switch) -> None:
    """Put one group beside one layer; it computes as soon as the switch says so."""
    add_group(model.get_submodule(layer), name, group, switch)
    give_methods(model)


def check_known(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse a group that a model does not have, or that is merged."""
    groups = token_groups(model)
    known = [facts.name for facts in groups if not facts.merged]
    for name in names:
        if any(facts.name == name for facts in groups) and name not in known:
            raise BadRequestError(f"the token group {name!r} is merged: it is part of the model, and always on")
        if name not in known:
            has = did_you_mean(str(name), known) if known else "it has none"
            raise BadRequestError(f"the model has no token group {name!r}; {has}")


def use_tokens(model: nn.Module, names: str | Iterable[str] = ()) -> nn.Module:
    """Switch these groups on and all others off. Without any, the model computes what its base does, bit for bit."""
    wanted = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    check_known(model, wanted)
    switch = switch_of(model)
    if switch is not None:
        switch.on, switch.was_on = tuple(wanted), ()
    return model


def train_tokens(model: nn.Module, name: str) -> nn.Module:
    """Let one group learn, and nothing else. It is switched on, with those that are."""
    check_known(model, [name])
    switch = switch_of(model)
    assert switch is not None
    own = {id(p) for _, groups in layers_with_groups(model) for p in groups.parameters()}
    if switch.held is None:
        switch.held = [p for p in model.parameters() if not p.requires_grad and id(p) not in own]
    model.requires_grad_(False)
    for _, groups in layers_with_groups(model):
        if name in groups:
            groups[name].requires_grad_(True)
    switch.turn_on(name)
    return model


def remove_tokens(model: nn.Module, name: str) -> nn.Module:
    """Take a group away. With the last one what `add_tokens` froze can be trained again."""
    check_known(model, [name])
    remove_group(model, name)
    return model


@torch.no_grad()
def merge_tokens(model: nn.Module, name: str) -> nn.Module:
    """Make a group part of the model for good: always on, saved with it, and no old weight is touched.

    Tokens with norm="shared" are appended to those of their layers, as if the model had grown by them. Those with a
    normaliser of their own stay beside them, for which the model must be a TokenFormer. Then the group is trained when
    the base is: with no other group left, all of the model can be.
    """
    check_known(model, [name])
    (facts,) = [facts for facts in token_groups(model) if facts.name == name]
    if any(name in groups and groups[name].key_bias is not None for _, groups in layers_with_groups(model)):
        raise BadRequestError(
            f"merge_tokens: {name!r} has thresholds (a key bias), for which a model's own tokens have no place; keep "
            "it as a group"
        )
    if facts.norm == "shared":
        _check_even(model, facts)
        for layer, groups in layers_with_groups(model):
            if name in groups:
                _append(model.get_submodule(layer), groups[name])
        for part, record in growth_records(model):
            record.record_growth(part, {"method": "merge", "seed": 0, "noise": 0.0})
        return remove_tokens(model, name)
    check_kept(model, "merge_tokens")
    keep_group(model, name, merged=True, what="merge_tokens")
    switch = switch_of(model)
    assert switch is not None
    switch.forget(name)
    switch.merged = (*switch.merged, name)
    for _, groups in layers_with_groups(model):
        if name in groups:
            groups[name].requires_grad_(False)
    thaw_if_whole(model, switch)
    return model


def _check_even(model: nn.Module, facts: GroupFacts) -> None:
    """Refuse to append tokens to some layers of a role only: a configuration has one count for all of them."""
    for part, record in growth_records(model):
        if isinstance(record, TokenFormerBaseConfig):
            for role, layers in record.token_roles.items():
                names = [name for name, _ in pattention_layers(model) if name.rpartition(".")[2] in layers]
                if len({facts.layers.get(name) for name in names}) > 1:
                    raise BadRequestError(
                        f"merge_tokens: {facts.name!r} has other numbers of tokens in some {role} layers than in "
                        f"others, and {type(part).__name__} has one for all; keep it as a group"
                    )


def _append(module: nn.Module, group: TokenGroup) -> None:
    assert isinstance(module, Pattention)
    for own in ("key_tokens", "value_tokens"):
        old: nn.Parameter = getattr(module, own)
        replace_data(old, torch.cat([old, getattr(group, own).to(old.dtype)]))
    if module.key_bias is not None:
        replace_data(module.key_bias, torch.cat([module.key_bias, module.key_bias.new_zeros(group.num_tokens)]))
