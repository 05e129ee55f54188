"""token_ages(): which growth step every token came from, as far as the model's configuration remembers.

Enters: a model. Leaves: by the names of places a whole number for each token: 0 was there from the beginning, k came
with the k-th step of `config.growth_history`, -1 cannot be told: a shrink or a sort has moved it, an adopted model has
grown (its record keeps no counts), or it is of a group that did not come by growth.

After a split every old token is shared out over its copies, of which the first keeps its age and the others are as
young as the step. The tokens of a new block are as young as the block, copied or not.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..growth.step import REARRANGING
from ..models import TokenFormerBaseConfig, growth_records
from ..models.blocks import BlockGrowth
from .places import Layers, Place, bare, find_places

UNKNOWN = -1


def token_ages(model: nn.Module, layers: Layers = None) -> dict[str, Tensor]:
    """By layer, the number of the growth step that every token came with: [n]; 0 from the beginning, -1 unknown."""
    model, names = bare(model), {id(module): name for name, module in bare(model).named_modules()}
    places = find_places(model, layers, "token_ages")
    ages = {name: torch.full((place.num_tokens,), UNKNOWN) for name, place in places.items()}
    for part, record in growth_records(model):
        prefix = names[id(part.base_model)]
        for name, place in places.items():
            inner = place.layer_name.removeprefix(f"{prefix}.") if prefix else place.layer_name
            if isinstance(record, TokenFormerBaseConfig):
                ages[name] = _ages(record, inner, place)
            elif not record.growth and place.group is None:
                ages[name] = torch.zeros(place.num_tokens, dtype=torch.long)
    return ages


def _ages(config: TokenFormerBaseConfig, name: str, place: Place) -> Tensor:
    """Of a layer of a TokenFormer, by its name in the base model; or of a group beside it."""
    steps = list(enumerate(config.growth_history or [], start=1))
    if place.group is not None:
        of_group = [number for number, step in steps if step.get("group") == place.group]
        return torch.full((place.num_tokens,), of_group[0] if of_group else UNKNOWN)
    role = next((role for role, names in config.token_roles.items() if name.rpartition(".")[2] in names), None)
    if role is None:
        return torch.full((place.num_tokens,), UNKNOWN)
    stack, _, rest = name.removeprefix(f"{config.blocks.stack}.").partition(".")
    block = int(stack) if rest and stack.isdecimal() else None
    found, known = place.num_tokens, []  # from the last step to the first
    for number, step in reversed(steps):
        if step["after"][role] != found:
            return torch.full((place.num_tokens,), UNKNOWN)
        before = step["before"][role]
        if step["method"] in REARRANGING:
            known.append((found, UNKNOWN))
            return _joined(known)
        known.append((found - before, number))
        found = before
        if "blocks" in step and block is not None:
            block, is_new = _origin(step["blocks"], block)
            if is_new:
                known.append((found, number))
                return _joined(known)
    return _joined([*known, (found, 0)])


def _origin(blocks: Mapping[str, Any], block: int) -> tuple[int, bool]:
    return BlockGrowth(**blocks).origins[block]


def _joined(known: list[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.full((count,), age) for count, age in reversed(known)])


def earlier_layer(model: nn.Module, name: str, steps: int) -> str | None:
    """What a layer was called after so many growth steps of its model; None if it was not there, or nothing is known.

    Growth in depth puts new blocks between old ones, which then have other numbers.
    """
    model, names = bare(model), {id(module): name for name, module in bare(model).named_modules()}
    for part, record in growth_records(model):
        if not isinstance(record, TokenFormerBaseConfig):
            continue
        stack = f"{names[id(part.base_model)]}.{record.blocks.stack}.".removeprefix(".")
        number, _, rest = name.removeprefix(stack).partition(".")
        if not name.startswith(stack) or not number.isdecimal():
            return name
        block = int(number)
        for step in reversed((record.growth_history or [])[steps:]):
            if "blocks" in step:
                block, is_new = _origin(step["blocks"], block)
                if is_new:
                    return None
        return f"{stack}{block}.{rest}"
    return None
