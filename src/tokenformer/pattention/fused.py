"""Pattention, forward and backward, with as few passes over [rows, n] as torch's own kernels allow.

Enters: rows x [rows, d_in], key tokens [n, d_in], value tokens [n, d_out], a key bias [n] or None, a bias [d_out] or
None, tau (a number in a tensor); if the tokens stand in segments, how many in each, and then tau has one number for
each; a mask [rows, n] of the tokens that a row attends to, or None.
Leaves: the output; what backward needs; the gradients. The specification is `functional.py`: outputs and gradients
are the same up to rounding, for every finite input.

Between two matrix products the scores are normalised in place. One array of [rows, n] is kept for backward, in the
tokens' dtype, or none, and then it is computed again:

    l2_…      the normalised scores u = a / rms: GeLU(u) and its slope are cheaper to compute again than to keep
    gelu_l2   the scores
    softmax   the weights

Beside it `stats` holds three numbers per row in fp32 or wider: 1 / rms, the scale the row was divided by, and whether
the gradient passes through the norm: 1, or 0 where the smallest rms was put in its place. Of segments, each has a first
and a third number of its own: [rows, 2 s + 1].

On a CPU as many rows are taken at a time as give NUMBERS_AT_ONCE scores: the arrays that pass between the products
stay in the last-level cache, and the next rows reuse their memory. Rows are scaled as the specification
says only where that can matter: always in fp16 and away from the CPU (to ask would stop a GPU), otherwise if they are
larger than LARGEST_UNSCALED. On the CPU a row's own smallest rms is worked out only if some row comes near it: decoding
one token at a time, these small operations would weigh as much as the rest.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .functional import (
    ACTIVATIONS,
    LARGEST_ENTRY,
    LARGEST_SCALE,
    SMALLEST_EXPONENT,
    SMALLEST_RMS,
    heaviest,
    masked_score,
    row_scale,
    wide,
)

# The squares of the scores of smaller rows, all taken as one vector, stay far within fp32's and bf16's range.
LARGEST_UNSCALED = 2.0**35

# 16 MB in fp32. Fewer make the products slower, more leave the cache: see docs/performance.md.
NUMBERS_AT_ONCE = 2**22
FEWEST_ROWS = 256
# What a value that is gathered for one row costs, in terms of one in a product over all values: see docs/sizes.md.
GATHERED_COST = 1

# By kind: the activation into the memory of the normalised scores. Fresh memory would cost more than the norm.
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "l2_gelu": torch.ops.aten.gelu_,
    "l2_gelu_tanh": partial(torch.ops.aten.gelu_, approximate="tanh"),
    "l2_silu": torch.ops.aten.silu_,
    "l2_relu": torch.ops.aten.relu_,
}

# By kind: the gradient of a normalised score from that of its weight, into the latter's memory.
_SLOPES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "l2_gelu": lambda grad, u: torch.ops.aten.gelu_backward.grad_input(grad, u, grad_input=grad),
    "l2_gelu_tanh": lambda grad, u: torch.ops.aten.gelu_backward.grad_input(
        grad, u, approximate="tanh", grad_input=grad
    ),
    "l2_silu": lambda grad, u: torch.ops.aten.silu_backward.grad_input(grad, u, grad_input=grad),
    "l2_relu": lambda grad, u: torch.ops.aten.threshold_backward.grad_input(grad, u, 0, grad_input=grad),
}


def attend(
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    key_bias: Tensor | None,
    bias: Tensor | None,
    tau: Tensor,
    kind: str,
    segments: Sequence[int] = (),
    mask: Tensor | None = None,
    top_k: int | None = None,
) -> Tensor:
    """The output [rows, d_out] alone; nothing is kept."""
    if x.shape[0] <= FEWEST_ROWS:
        weights = weigh_rows(x, key_tokens, key_bias, tau, kind, segments, mask, keep=False).weights
        if top_k is not None:
            return mixed(weights, value_tokens, bias, top_k)
        return _product(weights.to(value_tokens.dtype), value_tokens, bias)
    out = value_tokens.new_empty(x.shape[0], value_tokens.shape[1])
    for some in _parts(x, key_tokens):
        weights = weigh_rows(x[some], key_tokens, key_bias, tau, kind, segments, _some(mask, some), keep=False).weights
        if top_k is not None:
            weights = heaviest(weights, top_k)
        _product(weights.to(value_tokens.dtype), value_tokens, bias, out=out[some])
    return out


def mixed(
    weights: Tensor,
    value_tokens: Tensor,
    bias: Tensor | None,
    top_k: int,
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None,
) -> Tensor:
    """The output of a few rows whose `top_k` heaviest tokens alone mix their values.

    `product` is one of rows, a transposed matrix and a bias, for those that are not gathered; torch's unless given.
    """
    if top_k >= weights.shape[1] or weights.shape[0] * top_k * GATHERED_COST > weights.shape[1]:
        some = heaviest(weights, top_k).to(value_tokens.dtype)
        return (product or F.linear)(some, value_tokens.mT, bias)
    chosen = weights.abs().topk(top_k, dim=1, sorted=False).indices  # [rows, k]
    heavy = weights.gather(1, chosen).to(value_tokens.dtype)
    out = F.embedding_bag(chosen, value_tokens, per_sample_weights=heavy, mode="sum")
    return out if bias is None else out + bias


def forward(
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    key_bias: Tensor | None,
    bias: Tensor | None,
    tau: Tensor,
    kind: str,
    keep: bool,
    segments: Sequence[int] = (),
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The output [rows, d_out], what backward needs [rows, n] if it is to be kept, and stats."""
    rows = x.shape[0]
    out = value_tokens.new_empty(rows, value_tokens.shape[1])
    kept = key_tokens.new_empty(rows, key_tokens.shape[0]) if keep else None
    stats = x.new_ones(rows, stats_width(segments), dtype=wide(x.dtype))
    inverse_rms, scale, free = _split(stats)
    for some in _parts(x, key_tokens):
        place = None if kept is None else kept[some]
        weighed = weigh_rows(x[some], key_tokens, key_bias, tau, kind, segments, _some(mask, some), place, keep)
        _product(weighed.weights.to(value_tokens.dtype), value_tokens, bias, out=out[some])
        inverse_rms[some] = weighed.inverse_rms
        if weighed.scale is not None:
            scale[some] = weighed.scale
        if weighed.free is not None:
            free[some] = weighed.free
    return out, kept, stats


def stats_width(segments: Sequence[int]) -> int:
    """How many numbers a row has in `stats`."""
    return 2 * max(1, len(segments)) + 1


def _split(stats: Tensor) -> tuple[Tensor, ...]:
    """1 / rms of every segment, the row's scale, and whether each norm is free."""
    segments = stats.shape[1] // 2
    return stats.split([segments, 1, segments], dim=1)


def backward(
    grad: Tensor,
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    key_bias: Tensor | None,
    tau: Tensor,
    kind: str,
    kept: Tensor | None,
    stats: Tensor,
    frozen: int,
    needs: Sequence[bool],
    segments: Sequence[int] = (),
    mask: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, keys, values, key bias and bias, each if `needs` says so; the first `frozen` tokens get zeros."""
    needs_x, needs_keys, needs_values, needs_key_bias, needs_bias = needs
    grad_x = x.new_empty(x.shape) if needs_x else None
    grad_keys = torch.zeros_like(key_tokens) if needs_keys else None
    grad_values = torch.zeros_like(value_tokens) if needs_values else None
    grad_key_bias = key_tokens.new_zeros(key_tokens.shape[0]) if needs_key_bias else None
    grad_bias = grad.sum(0) if needs_bias else None
    for some in _parts(x, key_tokens):
        rows, row_grad = x[some], grad[some]
        inverse_rms, scale, free = _split(stats[some])
        divisor = scale if _always_scales(x, key_tokens) or scale.max().item() != 1 else None
        weights: Tensor | None = None  # [rows, n]
        if kept is None:
            weighed = weigh_rows(rows, key_tokens, key_bias, tau, kind, segments, _some(mask, some))
            scores, weights = weighed.kept, weighed.weights.to(key_tokens.dtype)
        else:
            scores = kept[some]
            if needs_values or kind == "gelu_l2":
                weights = _weights_again(scores, inverse_rms, divisor, kind, segments)
        if grad_values is not None:
            assert weights is not None
            grad_values[frozen:].addmm_(weights[:, frozen:].mT, row_grad)
        if not (needs_x or needs_keys or needs_key_bias):
            continue
        grad_scores = row_grad @ value_tokens.mT  # [rows, n]
        _to_scores_(grad_scores, scores, weights, inverse_rms, divisor, free, tau, kind, segments)
        if mask is not None:
            grad_scores.masked_fill_(~mask[some], 0)
        if grad_keys is not None:
            grad_keys[frozen:].addmm_(grad_scores[:, frozen:].mT, _divided(rows, divisor, key_tokens.dtype))
        if grad_key_bias is not None:
            divided = grad_scores if divisor is None else grad_scores / divisor
            grad_key_bias[frozen:] += divided[:, frozen:].sum(0)
        if grad_x is not None and divisor is None and x.dtype == key_tokens.dtype:
            torch.mm(grad_scores, key_tokens, out=grad_x[some])
        elif grad_x is not None:
            grad_rows = (grad_scores @ key_tokens).to(stats.dtype)
            # Saturates instead of overflowing: for a tiny row the true gradient can exceed fp16's range.
            largest = torch.finfo(x.dtype).max
            grad_x[some] = grad_rows.div_(scale).clamp_(-largest, largest)
    return grad_x, grad_keys, grad_values, grad_key_bias, grad_bias


def _parts(x: Tensor, key_tokens: Tensor) -> Iterator[slice]:
    """Slices of rows. In half precision all at once: gradients of tokens would be rounded from part to part."""
    step = max(1, x.shape[0])
    if x.device.type == "cpu" and key_tokens.dtype.itemsize >= 4:
        step = max(FEWEST_ROWS, NUMBERS_AT_ONCE // key_tokens.shape[0])
    for start in range(0, x.shape[0], step):
        yield slice(start, start + step)


def _some(mask: Tensor | None, rows: slice) -> Tensor | None:
    return None if mask is None else mask[rows]


class _Rows(NamedTuple):
    """Weighed rows, and how: weights and kept [rows, n], scale [rows, 1], the rest [rows, 1] or one a segment.

    Without a `scale` rows are as given; without `free` all of them are.
    """

    weights: Tensor
    kept: Tensor
    inverse_rms: Tensor
    scale: Tensor | None
    free: Tensor | None


def weigh_rows(
    x: Tensor,
    key_tokens: Tensor,
    key_bias: Tensor | None,
    tau: Tensor,
    kind: str,
    segments: Sequence[int],
    mask: Tensor | None,
    kept: Tensor | None = None,
    keep: bool = True,
    score: Callable[..., Tensor] | None = None,
) -> _Rows:
    """`kept`: where to put what backward needs, if there is a place already. Without `keep`, weights overwrite it.

    `score` is what makes scores of rows and keys; _scores unless given.
    """
    score = score or _scores
    biased = key_bias is not None
    size = max(1.0 if biased else 0.0, _size(x, key_tokens))
    scale = row_scale(x, biased) if size > LARGEST_UNSCALED else None
    rows = _divided(x, scale, key_tokens.dtype)
    if kind == "softmax":
        scores = _true_scores(score(rows, key_tokens, key_bias, scale), scale)
        _mask_(scores, mask, kind)
        weights = _softmax(scores, segments).mul_(_per_token(tau, segments))
        if mask is not None:
            weights.masked_fill_(~mask, 0)  # where a row attends to no token of a segment, all had the same weight
        kept = weights.to(key_tokens.dtype) if kept is None else kept.copy_(weights)
        return _Rows(
            weights, kept, weights.new_ones(x.shape[0], max(1, len(segments)), dtype=wide(x.dtype)), scale, None
        )
    kept = score(rows, key_tokens, key_bias, scale, kept)
    _mask_(kept, mask, kind)
    weights = kept if kind in ACTIVATIONS else _rectified(kept, scale)
    norm = _reduced(weights, segments, partial(torch.linalg.vector_norm, dtype=wide(x.dtype)))
    # No row's scale is larger than this.
    largest_scale = max(2.0**SMALLEST_EXPONENT, 2 * size / LARGEST_ENTRY)
    if scale is None and x.numel() and norm.min().item() >= SMALLEST_RMS * largest_scale * tau.max().item():
        inverse_rms, free = tau / norm, None
    else:
        smallest = SMALLEST_RMS * (row_scale(x, biased) if scale is None else torch.ones_like(scale))
        rms = norm / tau
        inverse_rms, free = torch.maximum(rms, smallest).reciprocal(), rms >= smallest
    weights.mul_(_per_token(inverse_rms, segments))
    if kind in ACTIVATIONS:
        weights = (ACTIVATIONS if keep else IN_PLACE)[kind](kept)
    return _Rows(weights, kept, inverse_rms, scale, free)


def _scores(
    rows: Tensor, key_tokens: Tensor, key_bias: Tensor | None, scale: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Scores of rows that were divided by `scale`, which the key bias is too."""
    if scale is None or key_bias is None:
        return _product(rows, key_tokens.mT, key_bias, out)
    return _product(rows, key_tokens.mT, None, out).add_(key_bias / scale)


def _product(left: Tensor, right: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """left · right + bias, into `out` if it is given."""
    return torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)


def _size(x: Tensor, key_tokens: Tensor) -> float:
    """The largest entry of all rows; infinite where rows are scaled whatever they hold."""
    if _always_scales(x, key_tokens):
        return math.inf
    if not x.numel():
        return 0.0
    smallest, largest = x.aminmax()  # takes half as long as a norm
    return max(-smallest.item(), largest.item())


def _mask_(scores: Tensor, mask: Tensor | None, kind: str) -> None:
    if mask is not None:
        scores.masked_fill_(~mask, masked_score(kind, scores.dtype))


def _per_token(numbers: Tensor, segments: Sequence[int]) -> Tensor:
    """From one number a segment, [..., s], one a token, [..., n]. Without segments there is one for all tokens."""
    if not segments:
        return numbers
    sizes = torch.tensor(segments, device=numbers.device)
    return numbers.repeat_interleave(sizes, dim=-1, output_size=sum(segments))


def _reduced(array: Tensor, segments: Sequence[int], reduce: Callable[..., Tensor]) -> Tensor:
    """Of [rows, n], what `reduce` makes of each segment: [rows, s]. Neighbours of one size go in one call."""
    if not segments:
        return reduce(array, dim=-1, keepdim=True)
    parts, begin = [], 0
    for size, equal in groupby(segments):
        end = begin + size * len(list(equal))
        parts.append(reduce(array[:, begin:end].unflatten(1, (-1, size)), dim=-1))
        begin = end
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _softmax(scores: Tensor, segments: Sequence[int]) -> Tensor:
    if not segments:
        return scores.softmax(-1)
    return torch.cat([part.softmax(-1) for part in scores.split(list(segments), dim=1)], dim=1)


def _weights_again(
    kept: Tensor, inverse_rms: Tensor, divisor: Tensor | None, kind: str, segments: Sequence[int]
) -> Tensor:
    if kind in ACTIVATIONS:
        return ACTIVATIONS[kind](kept)
    if kind == "gelu_l2":
        return _rectified(kept, divisor).mul_(_per_token(inverse_rms, segments)).to(kept.dtype)
    return kept


def _to_scores_(
    grad: Tensor,
    kept: Tensor,
    weights: Tensor | None,
    inverse_rms: Tensor,
    divisor: Tensor | None,
    free: Tensor,
    tau: Tensor,
    kind: str,
    segments: Sequence[int],
) -> None:
    """Turns the gradient of the weights into that of the scores, in place. Overwrites `weights`, unless kept."""
    if kind == "softmax":
        # Divided by tau first: where one token has all the weight, the gradient is then zero to the last bit.
        each_tau = _per_token(tau, segments)
        shares = kept / each_tau  # [rows, n]
        gradient = _softmax_backward(grad.to(shares.dtype), shares, segments).mul_(each_tau)
        grad.copy_(gradient if divisor is None else gradient.mul_(divisor.clamp(max=LARGEST_SCALE)))
        return
    if kind in ACTIVATIONS:
        _SLOPES[kind](grad, kept)
        products = torch.mul(grad, kept, out=torch.empty_like(grad) if weights is None else weights)
        normalised = kept
    else:
        assert weights is not None
        products, normalised = grad * weights, weights
    dot = _reduced(products, segments, partial(torch.sum, dtype=free.dtype))  # [rows, 1]
    grad.addcmul_(normalised, _per_token(dot * free / tau.square(), segments), value=-1)
    grad.mul_(_per_token(inverse_rms, segments))
    if kind == "gelu_l2":
        true_scores = _true_scores(kept, divisor)
        grad.copy_(torch.ops.aten.gelu_backward(grad.to(true_scores.dtype), true_scores))


def _softmax_backward(grad: Tensor, shares: Tensor, segments: Sequence[int]) -> Tensor:
    if not segments:
        return torch._softmax_backward_data(grad, shares, -1, shares.dtype)
    sizes = list(segments)
    parts = zip(grad.split(sizes, dim=1), shares.split(sizes, dim=1), strict=True)
    return torch.cat([torch._softmax_backward_data(ours, share, -1, share.dtype) for ours, share in parts], dim=1)


def _always_scales(x: Tensor, key_tokens: Tensor) -> bool:
    return key_tokens.dtype == torch.float16 or x.device.type != "cpu"


def _divided(x: Tensor, divisor: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (x if divisor is None else x / divisor).to(dtype)


def _true_scores(scores: Tensor, divisor: Tensor | None) -> Tensor:
    return scores if divisor is None else scores * divisor.clamp(max=LARGEST_SCALE)


def _rectified(scores: Tensor, divisor: Tensor | None) -> Tensor:
    rectified = F.gelu(_true_scores(scores, divisor))
    return rectified if divisor is None else rectified.div_(divisor.clamp(max=LARGEST_SCALE))
