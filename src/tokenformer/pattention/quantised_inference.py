"""Quantised layers without gradients: the same as ever, in fewer operators, and several layers together.

Enters: rows [rows, d_in] of fp32, and the integers of one layer, or of several that see the same rows and whose
integers stand side by side in memory. Leaves: their outputs; or None where some row needs the care that the ordinary
form takes. Only for tokens of eight bits, on CPUs that multiply integers exactly.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .fused import FEWEST_ROWS, IN_PLACE, LARGEST_UNSCALED, NUMBERS_AT_ONCE
from .inference import is_plain_inference, largest_entry, weigh_
from .integer_products import can_be_exact, in_two, of_two
from .module import Tokens
from .operator import chosen_form
from .quantised import QuantisedPattention, QuantisedTokens


class Integers(NamedTuple):
    """Of layers that see the same rows: key codes [layers · n, d], scales [layers, n], and value codes [d_out, n]."""

    key_codes: Tensor
    key_scales: Tensor
    value_scales: Tensor
    value_codes: Sequence[Tensor]


def attend(x: Tensor, integers: Integers, tau: Tensor, kind: str) -> list[Tensor] | None:
    """Outputs [rows, d_out] of every layer for rows x [rows, d_in]; tau [layers, 1]."""
    step = max(FEWEST_ROWS, NUMBERS_AT_ONCE // integers.key_codes.shape[0])
    if x.shape[0] <= step:
        return _attend(x, integers, tau, kind)
    parts = [_attend(some, integers, tau, kind) for some in x.split(step)]
    done = [part for part in parts if part is not None]
    return [torch.cat(outputs) for outputs in zip(*done, strict=True)] if len(done) == len(parts) else None


def _attend(x: Tensor, integers: Integers, tau: Tensor, kind: str) -> list[Tensor] | None:
    size = largest_entry(x)
    if not size <= LARGEST_UNSCALED:
        return None
    key_codes, key_scales, value_scales, value_codes = integers
    both, unit = in_two(x)
    scores = of_two(both, key_codes).mul_(unit).view(len(x), *key_scales.shape).mul_(key_scales)  # [rows, layers, n]
    weights = weigh_(scores, size, tau, kind)
    if weights is None:
        return None
    both, unit = in_two((weights * value_scales).transpose(0, 1))  # [layers, 2 · rows, n]
    pairs = zip(both, unit, value_codes, strict=True)
    return [of_two(of_layer, codes).mul_(its_unit) for of_layer, its_unit, codes in pairs]


class InferenceQuantisedPattention(QuantisedPattention):
    """A quantised Pattention while its model is for inference."""

    def _attend(self, x: Tensor, tokens: Tokens, tau: Tensor) -> Tensor:
        if tokens.mask is None and not len(tokens.keys) and can_attend(x, self):
            rows, own = x.reshape(-1, x.shape[-1]), self.quantised
            integers = Integers(own.key_codes, own.key_scales[None], own.value_scales[None], [own.value_codes])
            outputs = attend(rows, integers, tau.view(1, 1), self.kind)
            if outputs is not None:
                return outputs[0].view(*x.shape[:-1], -1)
        # By name where `super()` would stand: another thread may take the class back while a call runs.
        return QuantisedPattention._attend(self, x, tokens, tau)


def can_attend(x: Tensor, layer: QuantisedPattention) -> bool:
    """Whether `attend` may be asked: for all tokens as int8, without biases, in the form that is chosen by itself."""
    own: QuantisedTokens = layer.quantised
    if own.bits != "int8" or layer.top_k is not None or layer.kind not in IN_PLACE or own.key_bias is not None:
        return False
    if layer.bias is not None or not x.numel() or x.dtype != torch.float32 or chosen_form(layer.form) != "fused":
        return False
    if min(own.num_tokens, own.d_in) < 2 or not can_be_exact(x):
        return False
    return is_plain_inference((x, own.key_scales, own.value_scales, None, None))
