"""ungrow(): the model before its last growth step.

smaller = ungrow(model)

Enters: a TokenFormer whose configuration remembers the step. Leaves: a model without what it appended. If nothing but
new tokens and blocks was trained since, that is the model from before, bit for bit; otherwise a warning says that it is
not, because old weights have moved, and have come to rely on what is now gone.
"""

import copy
import hashlib
import math
import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import BadRequestError
from ..models import TokenFormerBaseConfig, growth_records
from ..models.blocks import BlockGrowth
from ..models.kept_groups import remove_group
from ..models.prefixes import before_growth
from ..pattention import Pattention, pattention_layers
from ..pattention.groups import layers_with_groups
from .layer import replace_data
from .plan import find_stack, key_size
from .step import REARRANGING, LayerGrowth

Model = TypeVar("Model", bound=nn.Module)
# Integers as wide as numbers of so many bytes.
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def ungrow(model: Model, *, inplace: bool = False) -> Model:
    """Take the last growth step back.

    Args:
        model: a TokenFormer that has grown.
        inplace: shrink the model itself. Its optimizer must be made anew.
    """
    part, config = _grown(model)
    step = config.growth_history[-1]  # type: ignore[index]
    if step["method"] in REARRANGING:
        why = (
            "the last step was a shrink, and the tokens that it dropped are gone; load the model from before it"
            if step["method"] == "shrink"
            else "the tokens have been sorted since, so that the new ones no longer stand last; ungrow first, then sort"
        )
        raise BadRequestError(f"ungrow: {why}")
    if step["method"] == "split" and step["before"] != step["after"]:
        raise BadRequestError(
            "ungrow: the last step was a split, which shares every old token out over its copies, so that none is "
            "left; only steps by rotate, zero or random, and steps in depth, can be taken back"
        )
    for name, layer in pattention_layers(model):
        role = _role(config, name)
        if role is not None and step["before"][role] < layer.num_quantised:
            raise BadRequestError(
                f"ungrow: the tokens of the last step have been quantised since, in {name}; tokenformer.dequantize("
                "model) first"
            )
    if not inplace:
        model = copy.deepcopy(model)
        part, config = _grown(model)
        step = config.growth_history[-1]  # type: ignore[index]
    if "group" in step:
        remove_group(model, step["group"])
    if "blocks" in step:
        _remove_blocks(model, config, BlockGrowth(**step["blocks"]))
    for name, layer in pattention_layers(model):
        role = _role(config, name)
        if role is not None and layer.num_tokens > step["before"][role]:
            _shorten(layer, step["before"][role], step["method"])
    for role, count in step["before"].items():
        setattr(config, f"{role}_tokens", count)
    config.growth_history = [one for one in config.growth_history or [] if one is not step] or None
    config.token_prefixes = before_growth(config.token_prefixes, step, config.token_roles)
    model.zero_grad(set_to_none=True)
    if hasattr(model, "last_growth"):
        del model.last_growth
    _warn_if_moved(part, step)
    return model


def _role(config: TokenFormerBaseConfig, layer: str) -> str | None:
    return next((role for role, names in config.token_roles.items() if layer.rpartition(".")[2] in names), None)


def mark(model: nn.Module) -> str | None:
    """A digest of the sums over every parameter's bits, those of groups left out; None where there are no numbers."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.is_meta:
            return None
        if ".token_groups." not in name:
            bits = parameter.detach().contiguous().view(WORDS[parameter.element_size()])
            digest.update(f"{name} {bits.sum(dtype=torch.int64).item()} ".encode())
    return digest.hexdigest()[:16]


def _warn_if_moved(part: nn.Module, step: dict[str, Any]) -> None:
    if step.get("mark") not in (None, mark(part)):
        warnings.warn(
            "ungrow: old weights have been trained or cast since the model grew, so this is not the model from before; "
            "what they learnt beside the new tokens is lost with these",
            stacklevel=3,
        )


def _grown(model: nn.Module) -> tuple[nn.Module, TokenFormerBaseConfig]:
    records = [one for one in growth_records(model) if isinstance(one[1], TokenFormerBaseConfig)]
    if len(records) != 1:
        raise BadRequestError(f"ungrow: a TokenFormer is needed, and a {type(model).__name__} was given")
    part, config = records[0]
    assert isinstance(config, TokenFormerBaseConfig)
    if not config.growth_history:
        raise BadRequestError("ungrow: the model has not grown: its configuration remembers no step")
    return part, config


def _remove_blocks(model: nn.Module, config: TokenFormerBaseConfig, growth: BlockGrowth) -> None:
    _, stack = find_stack(model)
    places = list(zip(stack, growth.origins, strict=True))
    old = [block for block, (_, is_new) in places if not is_new]
    new = [block for block, (_, is_new) in places if is_new]
    for name in _groups(new) - _groups(old):
        remove_group(model, name)
    for index, block in enumerate(old):
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index  # type: ignore[assignment]
    del stack[:]
    stack.extend(old)
    config.num_hidden_layers = len(old)
    kept = {f"{config.blocks.stack}.{new}.": f"{config.blocks.stack}.{i}." for i, new in enumerate(_places(growth))}
    for group in config.token_groups or []:
        moved = {
            name.replace(after, before, 1): count
            for name, count in group["layers"].items()
            for after, before in kept.items()
            if name.startswith(after)
        }
        group["layers"] = moved


def _groups(blocks: Iterable[nn.Module]) -> set[str]:
    return {name for block in blocks for _, groups in layers_with_groups(block) for name in groups.names()}


def _places(growth: BlockGrowth) -> list[int]:
    """Where the old blocks are in the grown model."""
    return [place for place, (_, new) in enumerate(growth.origins) if not new]


@torch.no_grad()
def _shorten(layer: Pattention, count: int, method: str) -> None:
    step = LayerGrowth.by(method, count, layer.num_tokens, key_size(layer))
    for name in ("key_tokens", "value_tokens", "key_bias"):
        old: Tensor | None = getattr(layer, name)
        if old is not None:
            replace_data(old, old[: count - layer.num_quantised].clone())
    if step.rotated or method == "random":
        # Growth by random set tau to √n of the new size, as if it had been √n before.
        layer.tau = layer.tau / math.sqrt(step.after / step.before)
