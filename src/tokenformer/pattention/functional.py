"""Pattention in plain torch: the specification that every faster form is compared with.

Enters: rows x [..., d_in], key tokens [n, d_in], value tokens [n, d_out], the scale tau; if the layer has them, a key
bias [n] and an output bias [d_out], which the paper's layers do not have.
Leaves: [..., d_out] = Θ(x · Kᵀ + key bias) · V + bias, where Θ is one of KINDS:

    l2_gelu   GeLU(tau · a / ‖a‖₂)           the paper's; tau = √n at birth
    gelu_l2   tau · GeLU(a) / ‖GeLU(a)‖₂      tau = √n at birth
    softmax   tau · softmax(a)                tau = n at birth
    l2_gelu_tanh, l2_silu, l2_relu            as l2_gelu, with another activation

Every kind has three steps: rectify each score, reduce a row to one number (`normaliser`), finish each score
with it (`weigh`). Only the middle step looks across tokens, so tokens held in several groups (on other
devices, frozen or trained) form one layer when their normalisers are joined and their outputs added.

Tokens may stand in `segments`, so many in each: every segment then has a normaliser and a tau of its own, tau is one
number a segment, and the outputs of all segments are added. A `mask` [..., n] says which tokens a row attends to: the
others have no score, neither in the normaliser nor in the output, as if they were not there. With `top_k`, only so many
tokens of a row, the heaviest, mix their values: all of them are in the normaliser.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["l2_gelu", "gelu_l2", "softmax", "l2_gelu_tanh", "l2_silu", "l2_relu"]
KINDS: tuple[str, ...] = get_args(Kind)
"""How scores become weights: `l2_gelu` (the paper's), `gelu_l2`, `softmax`, `l2_gelu_tanh`, `l2_silu`, `l2_relu`."""

# What the kinds that normalise first do to a normalised score. All give 0 for 0, which is what lets zero keys be exact.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "l2_gelu": F.gelu,
    "l2_gelu_tanh": partial(F.gelu, approximate="tanh"),
    "l2_silu": F.silu,
    "l2_relu": F.relu,
}

# Rows are scaled by a power of two until their largest entry lies in (32, 64], so that in any dtype no score overflows
# or is lost to rounding. Rows smaller than 64 / 2¹⁶ are scaled by no more than 2¹⁶.
LARGEST_ENTRY = 64.0
SMALLEST_EXPONENT = -16

# GeLU and softmax get true scores, which is to say scores times the row's scale, but no more than this: kernels differ
# between makes of CPU, and near the end of a dtype's range some overflow where others do not. Nothing is lost: in such
# a row two scores that differ by one unit in the last place are so far apart that softmax picks the larger alone, and
# what GeLU does between zero and the identity is far below rounding.
LARGEST_SCALE = 2.0**64

# The root mean square of a scaled row's scores, if smaller, is taken to be this: an all-zero row then gives
# zero, not 0/0, and its gradient is finite.
SMALLEST_RMS = 2.0**-10


def default_tau(num_tokens: int, kind: str) -> float:
    """The scale a layer is born with: √n for the L2 kinds, n for softmax."""
    return float(num_tokens) if kind == "softmax" else math.sqrt(num_tokens)


def reference(
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    tau: float | Tensor,
    kind: str = "l2_gelu",
    *,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    segments: Sequence[int] = (),
    mask: Tensor | None = None,
    top_k: int | None = None,
) -> Tensor:
    """Attention of the rows of x over parameter tokens."""
    how: dict[str, Any] = {"key_bias": key_bias, "segments": segments, "mask": mask, "top_k": top_k}
    weights = token_weights(x, key_tokens, tau, kind, **how)  # [..., n]
    compute_dtype = torch.promote_types(x.dtype, value_tokens.dtype)
    out = weights.to(compute_dtype) @ value_tokens
    return out if bias is None else out + bias.to(out.dtype)


def token_weights(
    x: Tensor,
    key_tokens: Tensor,
    tau: float | Tensor,
    kind: str = "l2_gelu",
    *,
    key_bias: Tensor | None = None,
    segments: Sequence[int] = (),
    mask: Tensor | None = None,
    top_k: int | None = None,
) -> Tensor:
    """The weight that every value token gets in every row of x, [..., n], in fp32 or wider."""
    scores, scale = token_scores(x, key_tokens, key_bias)
    return weights_of(scores, scale, tau, kind, segments=segments, mask=mask, top_k=top_k)


def weights_of(
    scores: Tensor,
    scale: Tensor,
    tau: float | Tensor,
    kind: str,
    *,
    segments: Sequence[int] = (),
    mask: Tensor | None = None,
    top_k: int | None = None,
) -> Tensor:
    """Weights from the scores of rows that were divided by `scale`."""
    scores = rectify(scores, scale, kind)
    if mask is not None:
        scores = scores.masked_fill(~mask, masked_score(kind, scores.dtype))
    if segments:
        parts = zip(scores.split(list(segments), dim=-1), torch.as_tensor(tau).unbind(), strict=True)
        weights = torch.cat([weigh(part, normaliser(part, kind), own_tau, kind) for part, own_tau in parts], dim=-1)
    else:
        weights = weigh(scores, normaliser(scores, kind), tau, kind)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)
    return weights if top_k is None else heaviest(weights, top_k)


def heaviest(weights: Tensor, count: int) -> Tensor:
    """The weights of each row's `count` heaviest tokens, regardless of sign; those of the others are zero."""
    if count >= weights.shape[-1]:
        return weights
    chosen = weights.abs().topk(count, dim=-1, sorted=False).indices  # [..., count]
    return torch.zeros_like(weights).scatter(-1, chosen, weights.gather(-1, chosen))


def token_scores(x: Tensor, key_tokens: Tensor, key_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scores of the scaled rows, in fp32 or wider, and the scales: the true scores are `scores * scale`.

    The scale does not change what the L2 kinds compute, so it is not multiplied back where it could overflow.
    """
    scale = row_scale(x, biased=key_bias is not None)
    scores = ScaleRows.apply(x, scale) @ key_tokens.mT  # [..., n]
    scores = scores.to(wide(scores.dtype))
    if key_bias is not None:
        scores = scores + key_bias / scale
    return scores, scale


@torch.no_grad()
def row_scale(x: Tensor, biased: bool = False) -> Tensor:
    """The power of two that brings a row's largest entry into (32, 64], in fp32 or wider.

    For a `biased` layer every row has one more entry, 1, by which the key bias is multiplied.
    """
    # On a CPU, torch's own maximum norm takes thirty times as long.
    largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))  # [..., 1]
    if biased:
        largest = largest.clamp(min=1)
    exponent = torch.log2(largest.to(wide(x.dtype)) / LARGEST_ENTRY).ceil()
    return torch.exp2(exponent.clamp(min=SMALLEST_EXPONENT))


def rectify(scores: Tensor, scale: Tensor, kind: str) -> Tensor:
    """What a score becomes on its own, before it is normalised with the others."""
    if kind in ACTIVATIONS:
        return scores
    scale = scale.clamp(max=LARGEST_SCALE)
    if kind == "gelu_l2":
        return F.gelu(scores * scale) / scale
    if kind == "softmax":
        return scores * scale
    raise ValueError(f"kind={kind!r} is not known; choose one of {', '.join(KINDS)}")


def masked_score(kind: str, dtype: torch.dtype) -> float:
    """A rectified score that weighs nothing beside others."""
    return torch.finfo(dtype).min if kind == "softmax" else 0.0


def normaliser(scores: Tensor, kind: str) -> Tensor:
    """The one number a row's tokens share. Over groups of tokens it adds up (logaddexp for softmax)."""
    if kind == "softmax":
        return scores.logsumexp(dim=-1, keepdim=True)  # [..., 1]
    return scores.square().sum(dim=-1, keepdim=True)  # [..., 1]


def weigh(scores: Tensor, normaliser: Tensor, tau: float | Tensor, kind: str) -> Tensor:
    """The weight each value token gets, from its rectified score and the row's normaliser."""
    if kind == "softmax":
        return (scores - normaliser).exp() * tau
    # The clamp before the square root keeps the gradient of an all-zero row finite: it passes none back.
    smallest = (SMALLEST_RMS * tau) ** 2
    rms = normaliser.clamp(min=smallest).sqrt() / tau
    normalised = scores / rms
    return ACTIVATIONS[kind](normalised) if kind in ACTIVATIONS else normalised


class ScaleRows(torch.autograd.Function):
    """x / scale, with a gradient that saturates instead of overflowing: for a tiny row it can exceed fp16's range."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return (x.to(scale.dtype) / scale).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        largest = torch.finfo(ctx.dtype).max
        return (gradient.to(scale.dtype) / scale).clamp(-largest, largest).to(ctx.dtype), None


def hold(tokens: Tensor, frozen: int) -> Tensor:
    """The same tokens, of which the first `frozen` get no gradient."""
    return torch.cat([tokens[:frozen].detach(), tokens[frozen:]]) if frozen else tokens


def wide(dtype: torch.dtype) -> torch.dtype:
    """fp32, or the dtype itself if it is wider."""
    return torch.promote_types(dtype, torch.float32)
