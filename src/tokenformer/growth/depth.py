"""Growth in depth: new blocks that add nothing yet, so that the model computes what it did.

copy     a new block is a copy of an old one in which the layers that write to the stream of hidden states are zero.
         These get a gradient in the first step, since the copied keys weigh what they will write, and the others as
         soon as they are not zero.
fresh    the same, with random numbers of the size of the copied ones in place of all matrices; vectors are copied.
"""

import copy

import torch
from torch import nn

from ..models import growth_records
from ..models.adopted import blocks_of
from ..pattention.groups import layers_with_groups, take_away
from .layer import fill_normal, random_stream, rms
from .step import Growth


@torch.no_grad()
def grow_depth(model: nn.Module, growth: Growth) -> None:
    """Put new blocks between the old ones of a model, in place. The old ones stay the same objects."""
    depth = growth.depth
    assert depth is not None
    ((part, record),) = growth_records(model)
    where = blocks_of(part, record)
    stack = model.get_submodule(depth.stack)
    assert isinstance(stack, nn.ModuleList)
    old, blocks = list(stack), []
    for index, (origin, new) in enumerate(depth.origins):
        block = _copied(old[origin]) if new else old[origin]
        if new:
            if depth.new_blocks == "fresh":
                _draw_anew(block, f"{depth.stack}.{index}", growth.seed)
            for writer in where.writers_in(block):
                _silence(writer)
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index  # type: ignore[assignment]
        blocks.append(block)
    del stack[:]
    stack.extend(blocks)


def _copied(block: nn.Module) -> nn.Module:
    """A copy with the same configuration, which all parts of a model share, and without token groups."""
    shared = [config for module in block.modules() if (config := getattr(module, "config", None)) is not None]
    switches = [groups.switch for _, groups in layers_with_groups(block)]
    shared += switches
    new = copy.deepcopy(block, {id(each): each for each in shared})
    if switches and switches[0].held is not None:
        held = {id(parameter) for parameter in switches[0].held}
        pairs = zip(block.parameters(), new.parameters(), strict=True)
        switches[0].held += [made for parameter, made in pairs if id(parameter) in held]
    for name, _ in list(layers_with_groups(new)):
        take_away(new.get_submodule(name))
    new.zero_grad(set_to_none=True)
    return new


def _draw_anew(block: nn.Module, name: str, seed: int) -> None:
    for key, parameter in block.named_parameters():
        if parameter.dim() > 1 and not parameter.is_meta:
            fill_normal(parameter, rms(parameter), random_stream(seed, f"{name}.{key}"))


def _silence(writer: nn.Module) -> None:
    for key, parameter in writer.named_parameters():
        if key not in ("key_tokens", "key_bias"):
            parameter.zero_()
