"""grow(): a larger model that computes exactly what the smaller one did.

bigger = grow(model, factor=2)                                    # twice the tokens everywhere
bigger = grow(model, num_tokens={"ffn": 4096}, method="split")    # only the feed-forward blocks
bigger = grow(model, to="354m")                                   # up to a preset of the same width and depth
"""

import copy
from collections.abc import Mapping
from typing import TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import BadRequestError
from ..models import adopted_models
from ..pattention import pattention_layers
from .layer import grow_layer
from .plan import Growth, find_config, plan_growth

Model = TypeVar("Model", bound=nn.Module)


def grow(
    model: Model,
    factor: float | None = None,
    *,
    num_tokens: Mapping[str, int] | int | None = None,
    to: str | None = None,
    method: str = "zero",
    seed: int = 0,
    noise: float = 1.0,
    inplace: bool = False,
    exact: bool = True,
) -> Model:
    """Append parameter tokens to every Pattention of a model.

    Give one of `factor`, `num_tokens` (by role in a TokenFormer: qkv, out, ffn; by layer name or pattern in any
    other module) and `to` (a preset). `method` is zero, split or rotate, which are exact, or random, which is not and
    needs `exact=False`; see layer.py. `seed` decides the new tokens, `noise` the size of split's random parts in units
    of the values' scale.

    With `inplace` the model itself grows, layer by layer, in little more memory than it needs when grown, and an
    optimizer that holds its parameters stays valid for `grow_optimizer`. Gradients are cleared. The step is kept as
    `model.last_growth`.
    """
    growth = plan_growth(
        model, factor, num_tokens=num_tokens, to=to, method=method, seed=seed, noise=noise, exact=exact
    )
    return apply_growth(model, growth, inplace=inplace)


def apply_growth(model: Model, growth: Growth, *, inplace: bool = False) -> Model:
    """Carry out a planned growth step."""
    _check_growable(model)
    model = model if inplace else copy.deepcopy(model)
    layers = dict(pattention_layers(model))
    for name in growth.layers:
        grow_layer(name, layers[name], growth)
    model.zero_grad(set_to_none=True)
    _update_config(model, growth)
    model.last_growth = growth  # type: ignore[assignment]
    return model


def _check_growable(model: nn.Module) -> None:
    owners: dict[int, str] = {}
    for name, layer in pattention_layers(model):
        if name.endswith(".base_layer"):  # peft's name for what it wraps; its own matrices would not grow
            raise BadRequestError(
                f"grow: {name.partition('.base_layer')[0]} has an adapter on its tokens; merge it first "
                "(merge_and_unload), or grow the model without it"
            )
        for key, tokens in layer.named_parameters(recurse=False):
            if isinstance(tokens, DTensor):
                raise BadRequestError(
                    f"grow: {name}.{key} is sharded over devices; grow the full model or a checkpoint of it"
                )
            owner = owners.setdefault(id(tokens), name)
            if owner != name:
                raise BadRequestError(f"grow: {name}.{key} is shared with {owner}; untie them first")
    for host, record in adopted_models(model):
        record.check(host)


def _update_config(model: nn.Module, growth: Growth) -> None:
    for host, record in adopted_models(model):
        record.follow(host, {"method": growth.method, "seed": growth.seed, "noise": growth.noise})
    config = find_config(model)
    if config is None:
        return
    before = config.num_tokens
    for name, step in growth.layers.items():
        for role, suffixes in config.token_roles.items():
            if name.rpartition(".")[2] in suffixes:
                setattr(config, f"{role}_tokens", step.after)
    entry = {"method": growth.method, "seed": growth.seed, "noise": growth.noise}
    entry |= {"before": before, "after": config.num_tokens}
    config.growth_history = [*(config.growth_history or []), entry]
