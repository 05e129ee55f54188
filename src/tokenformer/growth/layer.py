"""Growth of one Pattention layer: what happens to its keys, values and tau. A key's bias is one more entry of the key.

zero     appended keys are zero and score zero; GeLU(0) = 0 and the L2 norm is as it was, whatever the appended
         values are. tau stays.
split    every token becomes c tokens with its key; their values sum to its value. The L2 norm grows by √c, so
         tau does too (for softmax, by c). Tokens beyond the largest multiple are appended as by zero.
rotate   appended keys are random rotations of the old ones, K' = Q K with QᵀQ = I, whose scores have, for every x,
         the same norm as the old scores; their values are zero. The L2 norm grows by a constant, and tau with it.
random   appended keys and values are random and tau is that of a layer born at the new size: not exact.

A step of shrinking/ has rows that stay, in their order, and a factor for tau.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..pattention import Pattention, default_tau
from .step import Growth, LayerGrowth


@torch.no_grad()
def grow_layer(name: str, layer: Pattention, growth: Growth) -> None:
    """Grow a layer in place. Its Parameters stay the same objects, so that an optimizer still holds them."""
    step = growth.layers[name]
    if step.kept is not None:
        for parameter, rows in kept_rows(layer, step.kept):
            replace_data(parameter, rows)
        layer.tau = grown_tau(layer.tau, layer.kind, step, growth.method)
        return
    keys, values = _with_bias(layer)
    tau = grown_tau(layer.tau, layer.kind, step, growth.method)
    if keys.is_meta:
        new_keys, new_values = keys.new_empty(step.after, keys.shape[1]), values.new_empty(step.after, layer.d_out)
    else:
        generator = random_stream(growth.seed, name)
        split_at = step.copies * step.before
        new_values = values.new_empty(step.after, layer.d_out)
        _share_out(values, step, growth.noise, new_values[:split_at], generator)
        fill_normal(new_values[split_at:], rms(values), generator)
        new_keys = keys.new_zeros(step.after, keys.shape[1])
        new_keys[:split_at] = keys.repeat(step.copies, 1)
        if growth.method == "random":
            fill_normal(new_keys[split_at:], rms(keys), generator)
        if step.rotated and keys.any():  # keys that are all zero have no rotation; their new values then let them learn
            new_keys[split_at:] = _rotations(keys, step.appended, generator)
            new_values[split_at:] = 0
    new_keys, new_values = new_keys[step.quantised :], new_values[step.quantised :]
    if layer.key_bias is not None:
        replace_data(layer.key_bias, new_keys[:, -1].clone())
        new_keys = new_keys[:, :-1]
    replace_data(layer.key_tokens, new_keys.contiguous() if not step.quantised else new_keys.clone())
    replace_data(layer.value_tokens, new_values if not step.quantised else new_values.clone())
    layer.tau = tau


def grown_tau(tau: Tensor, kind: str, step: LayerGrowth, method: str) -> Tensor:
    """The scale of a layer after a growth step."""
    if step.kept is not None:
        return tau * step.tau_factor
    if method == "random":
        return torch.full_like(tau, default_tau(step.after, kind))
    if step.rotated:
        return tau * math.sqrt(step.after / step.before)
    return tau * (step.copies if kind == "softmax" else math.sqrt(step.copies))


def kept_rows(layer: Pattention, kept: Sequence[int]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Every parameter of a layer that has a row for each token, with the rows of these tokens."""
    for parameter in (layer.key_tokens, layer.value_tokens, layer.key_bias):
        if parameter is not None:
            yield parameter, parameter.detach()[list(kept)]


def _with_bias(layer: Pattention) -> tuple[Tensor, Tensor]:
    """The keys [n, d_in], with their biases, if any, as one more column, and the values."""
    keys, values, key_bias = layer.all_tokens()
    return keys if key_bias is None else torch.cat([keys, key_bias.unsqueeze(1)], dim=1), values


def _share_out(values: Tensor, step: LayerGrowth, noise: float, out: Tensor, generator: torch.Generator) -> None:
    """Fill `out` with `copies` parts of `values` that sum to it: a c-th each, plus random parts that sum to zero."""
    parts = out.view(step.copies, *values.shape)
    if step.copies == 1:
        parts[0] = values
        return
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    shares = parts if parts.dtype == wide.dtype else torch.empty_like(parts, dtype=wide.dtype)
    for share in shares:
        fill_normal(share, noise * rms(values), generator)
    shares -= shares.mean(dim=0)
    shares += wide / step.copies
    parts[:-1] = shares[:-1]
    # The last part is the remainder, which makes up for the rounding of the others to a narrow dtype.
    parts[-1] = wide - parts[:-1].to(wide.dtype).sum(dim=0)


def _rotations(keys: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` keys K' of the size of the old ones K, with K'ᵀK' = (count / n) KᵀK, so that ‖K'x‖ follows ‖Kx‖."""
    factor = keys.double().cpu()
    if len(keys) > keys.shape[1]:
        factor = torch.linalg.qr(factor, mode="r").R  # fewer rows that have the same KᵀK
        # Their signs are made the same for all keys: the average of the weights, grown with the same seed, must get
        # nearly the keys that the weights get.
        factor = factor * torch.where(factor.diagonal() < 0, -1.0, 1.0).unsqueeze(1)
    drawn = torch.randn(count, len(factor), generator=generator, dtype=torch.float64)
    return math.sqrt(count / len(keys)) * torch.linalg.qr(drawn).Q @ factor


def fill_normal(out: Tensor, std: float, generator: torch.Generator) -> None:
    """Drawn on the CPU in fp32, so that a seed means the same tokens on every device and in every dtype."""
    out.copy_(torch.randn(out.shape, generator=generator, dtype=torch.float32).mul_(std))


def rms(tokens: Tensor) -> float:
    """The root mean square of existing tokens; that of a new layer if they are all zero."""
    rms = tokens.to(torch.promote_types(tokens.dtype, torch.float32)).square().mean().sqrt().item()
    return rms or tokens.shape[0] ** -0.5


def random_stream(seed: int, name: str) -> torch.Generator:
    """One stream per layer, so that a layer's new tokens do not depend on which others grow, or in which order."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def replace_data(parameter: Tensor, data: Tensor) -> None:
    """Give a parameter other numbers, of any shape. It stays the same object."""
    parameter.grad = None
    # A loss that is still alive holds a gradient accumulator with the old shape; a change of dtype drops it.
    other = torch.float16 if parameter.dtype != torch.float16 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = data
