"""Training only new tokens: the old ones, and everything that is not a token, must not move.

Frozen rows get no gradient (a Pattention does not even compute it), and are put back after every optimizer step, so
that neither weight decay nor momentum moves them by a bit. Works on whole tensors and on shards of them.
"""

import torch
from torch import Tensor, nn

from ..growth import Growth
from ..pattention import Pattention
from .shards import local, local_rows


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
            rows = local_rows(parameter, step.before)
            self._held.append((parameter, rows, local(parameter.detach())[:rows].clone()))

    def clear_gradients(self) -> None:
        """To be called before gradients are clipped, so that frozen rows do not count."""
        for parameter, rows, _ in self._held:
            if parameter.grad is not None:
                local(parameter.grad)[:rows] = 0

    @torch.no_grad()
    def put_back(self) -> None:
        """To be called after every optimizer step."""
        for parameter, rows, values in self._held:
            local(parameter)[:rows] = values
