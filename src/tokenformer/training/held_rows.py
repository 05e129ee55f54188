"""Rows that an optimizer must not move, or not yet as far as the others. On whole tensors and on shards of them.

FrozenRows is for training only new tokens and blocks: old tokens, and everything in old blocks that is not a token, get
no gradient (a Pattention does not even compute it), and are put back after every optimizer step, so that neither weight
decay nor momentum moves them by a bit. NewTokenWarmup is for the first steps after growth: Adam has not seen a gradient
of the new tokens yet, divides each by its own size, and would move all of them by the whole rate at once.
"""

import torch
from torch import Tensor, nn

from ..growth import Growth
from ..pattention import Pattention
from .distributed import local, local_rows


class FrozenRows:
    """The rows of a grown model that were there before `growth`, held still."""

    def __init__(self, model: nn.Module, growth: Growth) -> None:
        self._held: list[tuple[nn.Parameter, int, Tensor]] = []
        for name, parameter in model.named_parameters():
            layer, _, kind = name.rpartition(".")
            before, new = growth.origin(layer)
            if new or (growth.group is not None and growth.group.has(layer)):
                continue
            step = growth.layers.get(before)
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


class NewTokenWarmup:
    """The rows that `growth` appended, and its new blocks, of whose steps only a share is taken."""

    def __init__(self, model: nn.Module, growth: Growth) -> None:
        self._first: dict[nn.Parameter, int] = {}  # of the new rows, the first that this process holds
        self._before: list[Tensor] = []
        for name, parameter in model.named_parameters():
            layer, _, kind = name.rpartition(".")
            before, new = growth.origin(layer)
            step = growth.layers.get(before)
            if new or (growth.group is not None and growth.group.has(layer)):
                self._first[parameter] = 0
            elif step is not None and step.appended and kind != "bias":
                self._first[parameter] = local_rows(parameter, step.after - step.appended)

    def _rows(self) -> list[Tensor]:
        # Asked for anew each time: DDP gives the parameters other memory when it wraps the model.
        return [local(parameter.detach())[first:] for parameter, first in self._first.items()]

    def before_step(self) -> None:
        """To be called before every optimizer step that is to be scaled."""
        self._before = [rows.clone() for rows in self._rows()]

    @torch.no_grad()
    def scale_step(self, share: float) -> None:
        """To be called after it, with the share of it that is taken."""
        for rows, before in zip(self._rows(), self._before, strict=True):
            rows.copy_(torch.lerp(before, rows, share))
        self._before = []
