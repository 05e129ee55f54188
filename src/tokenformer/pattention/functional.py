"""Pattention in plain torch: the specification that every faster form is compared with.

Enters: rows x [..., d_in], key tokens [n, d_in], value tokens [n, d_out], the scale tau.
Leaves: [..., d_out] = Θ(x · Kᵀ) · V, where Θ is one of KINDS:

    l2_gelu   GeLU(tau · a / ‖a‖₂)           the paper's; tau = √n at birth
    gelu_l2   tau · GeLU(a) / ‖GeLU(a)‖₂      tau = √n at birth
    softmax   tau · softmax(a)                tau = n at birth

Every kind has three steps: rectify each score, reduce a row to one number (`normaliser`), finish each score
with it (`weigh`). Only the middle step looks across tokens, so tokens held in several groups (on other
devices, frozen or trained) form one layer when their normalisers are joined and their outputs added.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["l2_gelu", "gelu_l2", "softmax"]
KINDS: tuple[str, ...] = get_args(Kind)

# Rows with a larger entry are scaled down before the score matmul, by a power of two, so that no score
# overflows. Rows after a LayerNorm never are: their entries stay below √d.
LARGEST_ENTRY = 64.0

# A row whose scores have a smaller root mean square is treated as this small: an all-zero row then gives
# zero, not 0/0, and its gradient is finite.
SMALLEST_RMS = 1e-6


def default_tau(num_tokens: int, kind: str) -> float:
    """The scale a layer is born with: √n for the L2 kinds, n for softmax."""
    return float(num_tokens) if kind == "softmax" else math.sqrt(num_tokens)


def pattention(
    x: Tensor, key_tokens: Tensor, value_tokens: Tensor, tau: float | Tensor, kind: str = "l2_gelu"
) -> Tensor:
    """Attention of the rows of x over parameter tokens."""
    scores, scale, floor = token_scores(x, key_tokens)
    scores = rectify(scores, scale, kind)
    weights = weigh(scores, normaliser(scores, kind), tau, floor, kind)  # [..., n]
    compute_dtype = torch.promote_types(x.dtype, value_tokens.dtype)
    return weights.to(compute_dtype) @ value_tokens


def token_scores(x: Tensor, key_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of rows scaled to at most LARGEST_ENTRY, in fp32 or wider; the scales; the smallest norm per √n.

    The true scores are `scores * scale`. The L2 kinds do not feel the scale, so it is never multiplied back
    where it could overflow.
    """
    with torch.no_grad():
        largest = torch.linalg.vector_norm(x, ord=math.inf, dim=-1, keepdim=True)  # [..., 1]
        exponent = torch.log2(largest.to(_wide(x.dtype)) / LARGEST_ENTRY).ceil().clamp(min=0)
        scale = torch.exp2(exponent)
    scores = (x / scale.to(x.dtype)) @ key_tokens.mT  # [..., n]
    # Under autocast the matmul chose the dtype, and fp16 scores below its smallest normal number are noise.
    floor = max(SMALLEST_RMS, torch.finfo(scores.dtype).tiny) / scale
    return scores.to(_wide(scores.dtype)), scale, floor


def rectify(scores: Tensor, scale: Tensor, kind: str) -> Tensor:
    """What a score becomes on its own, before it is normalised with the others."""
    if kind == "l2_gelu":
        return scores
    largest = torch.finfo(scores.dtype).max
    true_scores = (scores * scale).clamp(-largest, largest)
    if kind == "gelu_l2":
        return F.gelu(true_scores) / scale
    if kind == "softmax":
        return true_scores
    raise ValueError(f"kind={kind!r} is not known; choose one of {', '.join(KINDS)}")


def normaliser(scores: Tensor, kind: str) -> Tensor:
    """The one number a row's tokens share. Over groups of tokens it adds up (logaddexp for softmax)."""
    if kind == "softmax":
        return scores.logsumexp(dim=-1, keepdim=True)  # [..., 1]
    return scores.square().sum(dim=-1, keepdim=True)  # [..., 1]


def weigh(scores: Tensor, normaliser: Tensor, tau: float | Tensor, floor: Tensor, kind: str) -> Tensor:
    """The weight each value token gets, from its rectified score and the row's normaliser."""
    if kind == "softmax":
        return (scores - normaliser).exp() * tau
    # sqrt has no gradient at zero, hence the clamp under it; the floor then decides, and passes none back.
    norm = normaliser.clamp(min=torch.finfo(normaliser.dtype).tiny).sqrt() / tau
    normalised = scores / torch.maximum(norm, floor)
    return F.gelu(normalised) if kind == "l2_gelu" else normalised


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
