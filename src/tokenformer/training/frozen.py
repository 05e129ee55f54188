"""Training only new tokens: the old ones, and everything that is not a token, must not move.

Frozen rows get no gradient (a Pattention does not even compute it), and are put back after every optimizer step, so
that neither weight decay nor momentum moves them by a bit. Works on whole tensors and on shards of them.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..growth import Growth
from ..pattention import Pattention


class FrozenRows:
    """The rows of a grown model that were there before `growth`, held still."""

    def __init__(self, model: nn.Module, growth: Growth) -> None:
        self._held: list[tuple[nn.Parameter, int, Tensor]] = []
        for name, parameter in model.named_parameters():
            layer, _, kind = name.rpartition(".")
            step = growth.layers.get(layer)
            if step is None or kind == "bias":
                parameter.requires_grad_(False)
                continue
            pattention = model.get_submodule(layer)
            assert isinstance(pattention, Pattention)
            pattention.frozen_tokens = step.before
            rows = _local_rows(parameter, step.before)
            self._held.append((parameter, rows, _local(parameter.detach())[:rows].clone()))

    def clear_gradients(self) -> None:
        """To be called before gradients are clipped, so that frozen rows do not count."""
        for parameter, rows, _ in self._held:
            if parameter.grad is not None:
                _local(parameter.grad)[:rows] = 0

    @torch.no_grad()
    def put_back(self) -> None:
        """To be called after every optimizer step."""
        for parameter, rows, values in self._held:
            _local(parameter)[:rows] = values


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_rows(parameter: Tensor, before: int) -> int:
    """How many of the first `before` rows this process holds."""
    if not isinstance(parameter, DTensor):
        return before
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return max(0, min(before - offset[0], shape[0]))
