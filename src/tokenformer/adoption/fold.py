"""From a norm and the linears that follow it to parameter tokens that compute the same. The algebra, in float64.

Enters: the weights of a norm (`NormOutput`) and of the linears that read it. Leaves: keys, values, biases and tau
(`Tokens`).

A norm makes all rows equally long. With z for a row before the norm's own weight and bias, ‖z‖² = d, and linears of z
are what scores are. `l2_gelu` and its kind divide scores by their norm; so the tokens are chosen such that this norm is
the same number for every row, tau is that number, and what is left is activation(scores) · values.

FFN, act(W z + b) V: the tokens are those of W and V, and ballast, tokens without a value that make up the norm. With
WᵀW = Q Λ Qᵀ, w = QᵀWᵀb and any α above Λ, the rows e_i = √(α − λ_i) q_iᵀ with biases −w_i / √(α − λ_i) give

    ‖W z + b‖² + ‖E z + e‖² = α d + ‖b‖² + Σ w_i² / (α − λ_i) = tau²

for every z: the squares of E z fill every direction up to α, and the products cancel. α is the one of the smallest tau.

A linear, W z + b: g(u) − g(−u) = u for GeLU, SiLU and ReLU, so a key q and its opposite give the score itself. An
orthonormal basis R of the rows of W and −R are the keys, R Wᵀ and −R Wᵀ the values. ‖R z‖ is ‖z‖ if R is whole, which
it is (the identity) unless W has fewer rows than columns: there the rest of the basis, times √2, is the ballast.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """One Pattention: keys [n, d_in], values [n, d_out], tau, a key bias [n] if it needs one, a bias [d_out].

    The last `ballast` tokens only keep the norm constant; their values are zero.
    """

    keys: Tensor
    values: Tensor
    tau: float
    key_bias: Tensor | None
    bias: Tensor
    ballast: int


@dataclass(frozen=True)
class NormOutput:
    """The output of a norm: z · weight + bias, where every z has the length √d.

    centred: z has a mean of zero (LayerNorm). kept: the norm stays as it is. Otherwise EqualLength replaces it,
    and rows are z itself, with what eps leaves out: as their mean if centred, otherwise as one more channel.
    """

    weight: Tensor
    bias: Tensor
    centred: bool
    kept: bool

    @property
    def width(self) -> int:
        """Channels of z."""
        return len(self.weight) + (not self.kept and not self.centred)

    def of_z(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """A linear that reads the norm's output as one that reads z."""
        of_z = weight * self.weight  # [out, d]
        if self.centred and not self.kept:
            of_z = of_z - of_z.mean(dim=1, keepdim=True)  # blind to the mean, where EqualLength puts something
        return torch.nn.functional.pad(of_z, (0, self.width - of_z.shape[1])), bias + weight @ self.bias

    def read(self, keys: Tensor, key_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Keys that score z, and their biases, as keys that score what enters the layer."""
        if not self.kept:
            return keys, key_bias
        keys = keys / self.weight
        return keys, key_bias - keys @ self.bias

    @property
    def amplified(self) -> float:
        """How many times larger rounding errors are, relative to z, after z was read back from a kept norm's output."""
        return 1 + 2 * (self.bias / self.weight).square().mean().sqrt().item()


def ffn_tokens(
    rows: NormOutput,
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
    *,
    slack: float,
    single: float | None = None,
) -> Tokens:
    """The tokens of act(first(x)) passed to second; each of them is a weight [out, in] and a bias.

    slack: ballast may be left out as long as it makes up no more than this share of the squared norm.
    single: the rounding of the dtype, for one token as the ballast.
    """
    (weight, bias), (values, out_bias) = first, second
    keys, key_bias = rows.of_z(weight, bias)
    squared_tau, more_keys, more_bias = _ballast(rows, keys, key_bias, slack)
    if single is not None:
        return _with_one(weight, bias, values.mT, out_bias, squared_tau, single)
    keys, key_bias = rows.read(torch.cat([keys, more_keys]), torch.cat([key_bias, more_bias]))
    padded = torch.nn.functional.pad(values.mT, (0, 0, 0, len(more_keys)))
    return Tokens(keys, padded, math.sqrt(squared_tau), key_bias, out_bias, len(more_keys))


def linear_tokens(rows: NormOutput, weight: Tensor, bias: Tensor, *, single: float | None = None) -> Tokens:
    """The tokens of a linear, a weight [out, in] and a bias. `single` is as in `ffn_tokens`."""
    out, d = weight.shape
    if single is not None:
        # Either the input's channels or the output's are the scores: whichever are fewer.
        identity = torch.eye(min(d, out)).to(weight)
        half, values = (identity, weight.mT) if d <= out else (weight, identity)
        keys, values = torch.cat([half, -half]), torch.cat([values, -values])
        squared, _, _ = _ballast(rows, *rows.of_z(keys, keys.new_zeros(len(keys))), slack=0.0)
        return _with_one(keys, keys.new_zeros(len(keys)), values, bias, squared, single)
    of_z, out_bias = rows.of_z(weight, bias)
    whole = torch.linalg.qr(of_z.mT, mode="complete").Q.mT if out < d else torch.eye(rows.width).to(of_z)
    basis, rest = whole[: min(out, d)], whole[min(out, d) :]  # together [width, width]
    keys = torch.cat([basis, -basis, math.sqrt(2) * rest])
    values = basis @ of_z.mT  # [rank, out]
    values = torch.cat([values, -values, values.new_zeros(len(rest), out)])
    keys, key_bias = rows.read(keys, keys.new_zeros(len(keys)))
    return Tokens(keys, values, math.sqrt(2 * d), key_bias if rows.kept else None, out_bias, len(rest))


def _ballast(rows: NormOutput, keys: Tensor, key_bias: Tensor, slack: float) -> tuple[float, Tensor, Tensor]:
    """tau², and the rows E and biases e for which ‖K z + k‖² + ‖E z + e‖² is tau², for keys K and biases k of z."""
    d, width = len(rows.weight), rows.width
    gram = keys.mT @ keys  # [width, width]
    products = keys.mT @ key_bias
    if rows.kept and rows.centred:
        # z has no mean: that direction is made the one of the largest eigenvalue, and left out.
        away = torch.eye(width).to(gram) - 1 / width
        gram = away @ gram @ away
        gram, products = gram + (1 + 2 * gram.trace()) / width, away @ products
    values, vectors = torch.linalg.eigh(gram)
    if rows.kept and rows.centred:
        values, vectors = values[:-1], vectors[:, :-1]
    products = vectors.mT @ products
    scored = keys.any() or key_bias.any()  # if not, the ballast has the norm to itself
    gaps = (_level(values, products, d) if scored else 1) - values  # α − λ_i >= 0
    filled = gaps > 0
    biases = torch.where(filled, -products / gaps.clamp(min=torch.finfo(gaps.dtype).tiny).sqrt(), 0)
    squared_tau = (values[-1] + gaps[-1]) * d + key_bias.square().sum() + biases.square().sum()
    # The most that a row can add to the squared norm of any z.
    share = (gaps.clamp(min=0) * d).sqrt().add(biases.abs()).square() / squared_tau
    order = share.argsort()
    needed = order[share[order].cumsum(0) > slack].sort().values
    more_keys = gaps[needed].sqrt()[:, None] * vectors.mT[needed]
    return squared_tau.item(), more_keys, biases[needed]


def _level(values: Tensor, products: Tensor, d: int) -> Tensor:
    """The α of the smallest tau: tau² is convex in α, and its slope d − Σ w_i² / (α − λ_i)² is zero there."""
    low = values[-1] + products[-1].abs() / math.sqrt(d)
    high = values[-1] + products.norm() / math.sqrt(d)
    for _ in range(200):
        middle = (low + high) / 2
        if (products / (middle - values)).square().sum() > d:
            low = middle
        else:
            high = middle
    return high


def _with_one(
    keys: Tensor, key_bias: Tensor, values: Tensor, bias: Tensor, squared_norm: float, rounding: float
) -> Tokens:
    """One token as the ballast: no key, and a bias so large that what the others add to the norm is lost in rounding.

    `squared_norm` is the most that they add. The bias is negative: the activation of its score is zero, and the token
    is silent.
    """
    large = 4 * squared_norm / rounding
    return Tokens(
        torch.nn.functional.pad(keys, (0, 0, 0, 1)),
        torch.nn.functional.pad(values, (0, 0, 0, 1)),
        math.sqrt(large + squared_norm / 2),
        torch.cat([key_bias, key_bias.new_tensor([-math.sqrt(large)])]),
        bias,
        1,
    )
