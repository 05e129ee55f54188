"""Pattention and linear layers without gradients, by oneDNN's product: less time for every row, most for a few.

Enters: the rows and tokens of one Pattention, or of several that see the same rows and whose keys stand side by side
in memory. Leaves: their outputs, the same as the fused form's up to rounding; or None where some row needs the care
that the fused form takes, and nothing was changed.

torch multiplies fp32 matrices on CPUs by MKL, which does not use all of the instructions of every make of CPU; oneDNN,
which torch brings along for lower precision and for compiled models, does. It takes the weights as they lie in memory.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .functional import LARGEST_ENTRY, SMALLEST_EXPONENT, SMALLEST_RMS, wide
from .fused import FEWEST_ROWS, IN_PLACE, LARGEST_UNSCALED, NUMBERS_AT_ONCE, mixed
from .module import Pattention, Tokens
from .operator import Tensors, can_be_fast, chosen_form, keeps_nothing

DTYPES = (torch.float32, torch.bfloat16)
# Products of fewer multiplications are MKL's: a call of oneDNN takes 10 µs whatever it multiplies.
LEAST_WORK = 2**19
# oneDNN's GeLU takes longer to call than to compute so few numbers.
FEW_NUMBERS = 2**12


@cache
def _onednn_product() -> Any:
    """oneDNN's product with a bias, which compiled models call; None in builds of torch without it."""
    if not torch.backends.mkldnn.is_available():
        return None
    multiply = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if multiply is not None:
        try:
            multiply(torch.ones(1, 2), torch.ones(3, 2), None, "none", [], "")
        except RuntimeError:
            return None
    return multiply


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [..., d_in] · weightᵀ [d_in, d_out] + bias. The weight may be a transposed view."""
    multiply = _onednn_product() if rows.dtype == torch.float32 and torch.backends.mkldnn.enabled else None
    work = rows.numel() * weight.shape[0]
    if multiply is None or rows.device.type != "cpu" or work < LEAST_WORK or not work:
        return F.linear(rows, weight, bias)
    return multiply(rows, weight, bias, "none", [], "")


def attend(
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Sequence[Tensor],
    tau: Tensor,
    kind: str,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    top_k: int | None = None,
) -> list[Tensor] | None:
    """Outputs [rows, d_out] of every layer for rows x [rows, d_in].

    key_tokens [layers · n, d_in] has the layers one after the other, `tau` a number for each. Biases and `top_k` are
    for one layer.
    """
    step = max(FEWEST_ROWS, NUMBERS_AT_ONCE // key_tokens.shape[0])
    how = (key_tokens, value_tokens, tau, kind, key_bias, bias, top_k)
    if x.shape[0] <= step:
        return _attend(x, *how)
    parts = [_attend(some, *how) for some in x.split(step)]
    done = [part for part in parts if part is not None]
    return [torch.cat(outputs) for outputs in zip(*done, strict=True)] if len(done) == len(parts) else None


def _attend(
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Sequence[Tensor],
    tau: Tensor,
    kind: str,
    key_bias: Tensor | None,
    bias: Tensor | None,
    top_k: int | None,
) -> list[Tensor] | None:
    size = largest_entry(x, key_bias)
    if not size <= LARGEST_UNSCALED:
        return None
    layers = len(value_tokens)
    scores = product(x, key_tokens, key_bias).view(x.shape[0], layers, -1)  # [rows, layers, n]
    weights = weigh_(scores, size, tau.view(-1, 1), kind)
    if weights is None:
        return None
    if top_k is not None:
        return [mixed(weights[:, 0], value_tokens[0], bias, top_k, product)]
    if layers == 1:
        return [product(weights[:, 0], value_tokens[0].mT, bias)]
    return [product(weights[:, layer].contiguous(), values.mT) for layer, values in enumerate(value_tokens)]


def largest_entry(x: Tensor, key_bias: Tensor | None = None) -> float:
    """Of all rows; NaN where there is one."""
    smallest, largest = x.aminmax()
    return max(-smallest.item(), largest.item(), 1.0 if key_bias is not None else 0.0)


def weigh_(scores: Tensor, size: float, tau: Tensor, kind: str) -> Tensor | None:
    """The weights in place of scores [rows, layers, n] of rows whose largest entry is `size`; None if some need care.

    tau [layers, 1].
    """
    norm = torch.linalg.vector_norm(scores, dim=-1, keepdim=True, dtype=wide(scores.dtype))  # [rows, layers, 1]
    inverse_rms = tau / norm
    # No row's scale is larger than this. An rms that even so is no smaller than the smallest needs no care.
    largest_scale = max(2.0**SMALLEST_EXPONENT, 2 * size / LARGEST_ENTRY)
    if not inverse_rms.max().item() * SMALLEST_RMS * largest_scale <= 1:
        return None
    scores.mul_(inverse_rms)
    if kind == "l2_gelu" and scores.numel() <= FEW_NUMBERS and not scores.numel() % 2:
        torch.ops.aten.gelu_(scores.view(2, -1).mT)  # torch's own, which is taken for what is transposed
        return scores
    return IN_PLACE[kind](scores)


# Below, the class is named where `super()` would stand: another thread may take the class back while a call runs.


class InferencePattention(Pattention):
    """A Pattention while its model is for inference."""

    def _attend(self, x: Tensor, tokens: Tokens, tau: Tensor) -> Tensor:
        outputs = None
        if tokens.mask is None and can_attend(x, self, tokens.keys, tokens.values, tokens.key_bias, self.bias):
            rows = x.reshape(-1, x.shape[-1])
            how = (tau, self.kind, tokens.key_bias, self.bias, self.top_k)
            outputs = attend(rows, tokens.keys, [tokens.values], *how)
        return Pattention._attend(self, x, tokens, tau) if outputs is None else outputs[0].view(*x.shape[:-1], -1)


class InferenceLinear(nn.Linear):
    """A linear layer while its model is for inference."""

    def forward(self, input: Tensor) -> Tensor:
        if is_plain_inference((input, self.weight, self.weight, None, self.bias)):
            return product(input, self.weight, self.bias)
        return nn.Linear.forward(self, input)


def can_attend(
    x: Tensor, layer: Pattention, keys: Tensor, values: Tensor, key_bias: Tensor | None, bias: Tensor | None
) -> bool:
    """Whether `attend` may be asked: for a kind that normalises first, in the form that is chosen by itself."""
    if layer.kind not in IN_PLACE or not x.numel() or chosen_form(layer.form) != "fused":
        return False
    return is_plain_inference((x, keys, values, key_bias, bias))


def is_plain_inference(tensors: Tensors) -> bool:
    """Whether these are ordinary tensors on a CPU, in a dtype whose rows need no scaling, and no gradient is wanted."""
    x, weight, *_ = tensors
    if x.device.type != "cpu" or weight.dtype not in DTYPES:
        return False
    return keeps_nothing(tensors) and can_be_fast(tensors, tau=1.0)
