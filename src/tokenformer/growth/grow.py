"""grow(): a larger model that computes exactly what the smaller one did.

bigger = grow(model, factor=2)                                    # twice the tokens everywhere
bigger = grow(model, num_tokens={"ffn": 4096}, method="split")    # only the feed-forward blocks
bigger = grow(model, to="354m")                                   # up to a preset of the same width
bigger = grow(model, depth=8)                                     # more blocks; with factor=2 more tokens as well
"""

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import BadRequestError
from ..models import TokenFormerBaseConfig, growth_records
from ..models.kept_groups import check_name
from ..pattention import pattention_layers
from .depth import grow_depth
from .group import as_group as group_growth
from .group import grow_group
from .growable import check_growable
from .layer import grow_layer
from .optimizer import check_optimizer, grow_optimizer
from .plan import plan_growth
from .step import Growth
from .ungrow import mark

Model = TypeVar("Model", bound=nn.Module)


def grow(
    model: Model,
    factor: float | None = None,
    *,
    num_tokens: Mapping[str, int] | int | None = None,
    to: str | None = None,
    depth: int | None = None,
    new_blocks: str = "copy",
    new_blocks_at: str = "after_each",
    method: str | None = None,
    seed: int = 0,
    noise: float = 1.0,
    inplace: bool = False,
    optimizer: Optimizer | None = None,
    exact: bool = True,
    as_group: str | None = None,
) -> Model:
    """Append parameter tokens to every Pattention of a model, add blocks to it, or both.

    Give one of `factor`, `num_tokens` and `to`, or `depth`, by itself or with one of the first two.

    Gradients are cleared, and the step is kept as `model.last_growth`.

    Args:
        model: any module that contains Pattention layers.
        factor: how many times as many tokens every layer gets.
        num_tokens: the new counts: by role in a TokenFormer (qkv, out, ffn), by layer name or pattern in any other
            module, or one number for all.
        to: a preset of the same width; of its tokens and blocks no number may be below the model's.
        depth: how many blocks a TokenFormer or an adopted model gets. New ones add nothing at first.
        new_blocks: copy, what each is made from, the one before it; or fresh, random numbers of the same size.
        new_blocks_at: after_each, spread evenly over the model; or top, after its last block.
        method: rotate, split or zero, which are exact, or random, which is not. If None, rotate, or split for the kinds
            of Pattention and the adopted models of which rotate is not exact.
        seed: decides the new tokens.
        noise: size of split's random parts, in units of the values' scale.
        inplace: grow the model itself, layer by layer, in little more memory than the grown one needs. An optimizer
            that holds its parameters stays valid for `grow_optimizer`.
        optimizer: with `inplace`, grow it as well; if its state cannot follow, neither is touched.
        exact: False allows `random`, which changes what the model computes.
        as_group: put the new tokens into a group of this name, with normalisers of its own: `use_tokens(model)` then
            switches the step off, and if nothing else was trained, what is left is the model before it, bit for bit.
    """
    growth = plan_growth(
        model,
        factor,
        num_tokens=num_tokens,
        to=to,
        depth=depth,
        new_blocks=new_blocks,
        new_blocks_at=new_blocks_at,
        method=method,
        seed=seed,
        noise=noise,
        exact=exact,
    )
    if as_group is not None:
        check_name(model, as_group)
        if method is not None or noise != 1.0 or not exact:
            raise BadRequestError(
                "grow: as_group is given with method, noise or exact; a group always has random keys and values of "
                "zero, so leave them out"
            )
        growth = group_growth(growth, as_group)
    return apply_growth(model, growth, inplace=inplace, optimizer=optimizer)


def apply_growth(model: Model, growth: Growth, *, inplace: bool = False, optimizer: Optimizer | None = None) -> Model:
    """Carry out a planned growth step, of a model, or of a model and its optimizer, in place."""
    check_growable(model, growth.method)
    if inplace:
        _check_alone(model, optimizer, growth.verb)
    if optimizer is not None:
        if not inplace:
            raise BadRequestError(
                f"{growth.verb}: optimizer= goes with inplace=True; for a new model use grow_optimizer(optimizer, "
                "model, new_model)"
            )
        check_optimizer(optimizer, model, growth)
    model = model if inplace else copy.deepcopy(model)
    # What `ungrow` compares with, which takes TokenFormers.
    marks = {
        part: {"mark": mark(part)}
        for part, record in growth_records(model)
        if isinstance(record, TokenFormerBaseConfig)
    }
    layers = dict(pattention_layers(model))
    for name in growth.layers:
        grow_layer(name, layers[name], growth)
    model.zero_grad(set_to_none=True)
    if growth.depth is not None:
        grow_depth(model, growth)
    if growth.group is not None:
        grow_group(model, growth)
    for part, record in growth_records(model):
        record.record_growth(part, {**growth.to_record(), **marks.get(part, {})})
    model.last_growth = growth  # type: ignore[assignment]
    if optimizer is not None:
        grow_optimizer(optimizer, model, model, growth=growth)
    return model


def _check_alone(model: nn.Module, optimizer: Optimizer | None, verb: str) -> None:
    """Refuse to change what several processes train together, whose buffers for gradients would keep the old size."""
    wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    shared = optimizer is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if wrapped or shared:
        raise BadRequestError(
            f"{verb}: several processes train this model, and DistributedDataParallel keeps the old sizes; {verb} the "
            "plain model and prepare it again, with a new optimizer by grow_optimizer, or use tokenformer train"
        )
