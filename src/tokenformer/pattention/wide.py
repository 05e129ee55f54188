"""Buffers that keep fp32 when a module is cast lower: constants that bf16 or fp16 would round to other values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class WideBuffers(nn.Module):
    """A module whose own floating-point buffers are never cast below fp32 by .half(), .bfloat16() or .to(dtype)."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.is_floating_point() and torch.finfo(new.dtype).bits < 32:
                self._buffers[name] = old.to(device=new.device)
        return self
