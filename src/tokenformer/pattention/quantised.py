"""A Pattention whose old tokens are integers: `QuantisedPattention`, and the tokens themselves, `QuantisedTokens`.

Enters: rows x [..., d_in]. Leaves: [..., d_out], what a Pattention with the tokens `scale · codes` computes. Every key
and every value has one scale. A key's is applied to its score, a value's to its weight, so that the products see only
integers (integer_products.py), and no token is ever made a row of floating-point numbers to compute with.

The integers never change. Tokens that the layer gets later stand behind them, in `key_tokens` and `value_tokens`, in
full precision, with no row at first; both share one normaliser.
"""

from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from . import fused
from .functional import ScaleRows, hold, row_scale, weights_of, wide
from .integer_products import LARGEST, Packed, pack_for_cpu, pack_nibbles, product, unpacked
from .module import Pattention, Tokens, WideBuffers
from .operator import chosen_form

Bits = Literal["int8", "int4"]
BITS: tuple[str, ...] = get_args(Bits)
# In which dtype the integers are kept. Those of four bits stand in pairs.
CODES = {"int8": torch.int8, "int4": torch.uint8}


@torch.no_grad()
def rounded(numbers: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Numbers [n, d] as integers, int8 [n, d], with a scale for each row [n]."""
    numbers = numbers.detach().to(wide(numbers.dtype))
    scales = numbers.abs().amax(1) / LARGEST[CODES[bits]]
    # A row of zeros has the scale zero, and stays one.
    codes = numbers / torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(1)
    return codes.round().to(torch.int8), scales


class QuantisedTokens(WideBuffers):
    """Tokens as integers, with one scale each: -127 to 127, or -7 to 7 two to a byte. Nothing of it is trained.

    The values' integers stand as [d_out, n], as their product reads them. A key's bias stays as it was.
    """

    key_codes: Tensor
    key_scales: Tensor
    value_codes: Tensor
    value_scales: Tensor
    key_bias: Tensor | None

    def __init__(
        self,
        d_in: int,
        d_out: int,
        num_tokens: int,
        bits: Bits,
        *,
        key_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.d_in, self.d_out, self.num_tokens, self.bits = d_in, d_out, num_tokens, bits
        of_codes, of_scales = {"device": device, "dtype": CODES[bits]}, {"device": device, "dtype": wide(dtype)}

        def width(columns: int) -> int:
            return columns if bits == "int8" else (columns + 1) // 2

        self.key_codes = nn.Buffer(torch.empty(num_tokens, width(d_in), **of_codes))  # type: ignore[arg-type]
        self.key_scales = nn.Buffer(torch.empty(num_tokens, **of_scales))  # type: ignore[arg-type]
        self.value_codes = nn.Buffer(torch.empty(d_out, width(num_tokens), **of_codes))  # type: ignore[arg-type]
        self.value_scales = nn.Buffer(torch.empty(num_tokens, **of_scales))  # type: ignore[arg-type]
        self.key_bias = nn.Buffer(torch.empty(num_tokens, **of_scales)) if key_bias else None  # type: ignore[arg-type]
        self._packed: dict[str, Packed | None] = {}

    @torch.no_grad()
    def fill(self, keys: Tensor, values: Tensor, key_bias: Tensor | None) -> None:
        """Round tokens [n, d_in] and [n, d_out]: the only place where anything is rounded."""
        self._packed = {}
        (codes, scales), (value_codes, value_scales) = (rounded(tokens, self.bits) for tokens in (keys, values))
        self._set_codes(codes, value_codes)
        self.key_scales, self.value_scales = scales, value_scales
        if key_bias is not None:
            self.key_bias = key_bias.detach().to(wide(key_bias.dtype), copy=True)

    def _set_codes(self, keys: Tensor, values: Tensor) -> None:
        """From int8 [n, d_in] and [n, d_out]."""
        values = values.mT.contiguous()
        self.key_codes = keys if self.bits == "int8" else pack_nibbles(keys)
        self.value_codes = values if self.bits == "int8" else pack_nibbles(values)

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor, key_bias: Tensor | None) -> None:
        """Round more tokens, and put them behind the old ones, whose integers and scales stay what they are."""
        new = QuantisedTokens(self.d_in, self.d_out, len(keys), self.bits, device="meta")
        new.fill(keys, values, key_bias)
        old_keys, old_values = self._integers()
        new_keys, new_values = new._integers()
        self._packed = {}
        self._set_codes(torch.cat([old_keys, new_keys]), torch.cat([old_values, new_values]))
        self.key_scales = torch.cat([self.key_scales, new.key_scales])
        self.value_scales = torch.cat([self.value_scales, new.value_scales])
        if self.key_bias is not None and key_bias is not None:
            self.key_bias = torch.cat([self.key_bias, key_bias.to(self.key_bias.dtype)])
        self.num_tokens += len(keys)

    def _integers(self) -> tuple[Tensor, Tensor]:
        return unpacked(self.key_codes, self.d_in), unpacked(self.value_codes, self.num_tokens).mT

    def dequantised(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The keys and values that these integers stand for."""
        keys, values = self._integers()
        return (
            (keys * self.key_scales.unsqueeze(1)).to(dtype),
            (values * self.value_scales.unsqueeze(1)).to(dtype).contiguous(),
        )

    def scores(self, x: Tensor, plain: bool = False) -> Tensor:
        """Of rows [rows, d_in], [rows, n] in fp32 or wider."""
        return product(x, self.key_codes, self._pack("key_codes", self.d_in), plain=plain) * self.key_scales

    def mix(self, weights: Tensor, plain: bool = False) -> Tensor:
        """The values, weighed: [rows, n] to [rows, d_out]."""
        weighed = weights * self.value_scales
        return product(weighed, self.value_codes, self._pack("value_codes", self.num_tokens), plain=plain)

    def _pack(self, name: str, columns: int) -> Packed | None:
        """What products of few rows read. Made when it is first needed; it is as large as the codes themselves."""
        if self.bits == "int8" or torch.compiler.is_exporting():
            return None
        if name not in self._packed:
            self._packed[name] = pack_for_cpu(getattr(self, name), columns)
        return self._packed[name]

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self._packed = {}
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self._packed = {}
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"num_tokens={self.num_tokens}, {self.bits}"


class QuantisedPattention(Pattention):
    """A Pattention that was quantised. It is not made, but an existing layer becomes one: `quantise_layer`."""

    quantised: QuantisedTokens

    @property
    def num_tokens(self) -> int:
        return self.num_quantised + self.key_tokens.shape[0]

    @property
    def num_quantised(self) -> int:
        return self.quantised.num_tokens

    def all_tokens(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and key bias of all tokens, made from integers for the quantised ones."""
        keys, values = self.quantised.dequantised(self.key_tokens.dtype)
        keys, values = torch.cat([keys, self.key_tokens]), torch.cat([values, self.value_tokens])
        return keys, values, self._whole_bias(self.key_bias)

    def _whole_bias(self, key_bias: Tensor | None) -> Tensor | None:
        """With that of the quantised tokens before it."""
        old = self.quantised.key_bias
        return None if old is None or key_bias is None else torch.cat([old.to(key_bias.dtype), key_bias])

    def reset_parameters(self, key_std: float | None = None, value_std: float | None = None) -> None:
        """Draw the tokens anew that are not quantised."""
        if len(self.key_tokens):
            super().reset_parameters(key_std, value_std)

    def _attend(self, x: Tensor, tokens: Tokens, tau: Tensor) -> Tensor:
        rows, mask = x.reshape(-1, x.shape[-1]), _rows_of_mask(x, tokens, self.num_quantised)
        dtype = torch.promote_types(x.dtype, tokens.values.dtype)
        if self._in_place(rows, tokens):
            out = self._attend_in_place(rows, tokens, tau, mask)
        else:
            weights = self._weights(rows, tokens, tau, mask)
            out = self.quantised.mix(weights[:, : self.num_quantised], self._plain)
            if len(tokens.values):
                values = hold(tokens.values, tokens.frozen)
                out = out + (weights[:, self.num_quantised :].to(dtype) @ values).to(out.dtype)
            out = out if self.bias is None else out + self.bias
        return out.to(dtype).view(*x.shape[:-1], -1)

    def token_weights(self, x: Tensor) -> Tensor:
        """As of any Pattention, the quantised tokens first."""
        tokens = self._tokens(x)
        rows, mask = x.reshape(-1, x.shape[-1]), _rows_of_mask(x, tokens, self.num_quantised)
        return self._weights(rows, tokens, self.tau, mask).view(*x.shape[:-1], -1)

    @property
    def _plain(self) -> bool:
        return torch.compiler.is_exporting() or chosen_form(self.form) == "reference"

    def _weights(self, rows: Tensor, tokens: Tokens, tau: Tensor, mask: Tensor | None) -> Tensor:
        """The specification, with integers for the first keys; differentiable."""
        key_bias = None if tokens.key_bias is None else hold(tokens.key_bias, tokens.frozen)
        key_bias = self._whole_bias(key_bias)
        scale = row_scale(rows, biased=key_bias is not None)
        scaled = ScaleRows.apply(rows, scale)
        scores = self.quantised.scores(scaled, self._plain)
        if len(tokens.keys):
            new = scaled @ hold(tokens.keys, tokens.frozen).to(scaled.dtype).mT
            scores = torch.cat([scores, new.to(scores.dtype)], dim=1)
        if key_bias is not None:
            scores = scores + key_bias / scale
        return weights_of(scores, scale, tau, self.kind, mask=mask, top_k=self.top_k)

    def _in_place(self, rows: Tensor, tokens: Tokens) -> bool:
        """Whether nothing is differentiated or traced, and the scores may be turned into weights where they are."""
        if torch.compiler.is_compiling() or self._plain or torch.is_autocast_enabled(rows.device.type):
            return False
        if self.top_k is not None:
            return False
        wants = any(tensor.requires_grad for tensor in (rows, tokens.keys, tokens.values))
        same = rows.dtype == tokens.keys.dtype == tokens.values.dtype
        return same and bool(rows.numel()) and not (wants and torch.is_grad_enabled())

    def _attend_in_place(self, rows: Tensor, tokens: Tokens, tau: Tensor, mask: Tensor | None) -> Tensor:
        """As _attend, in fewer passes, and for some rows at a time."""
        m, score = self.num_quantised, partial(self._scores, self.quantised)
        key_bias = self._whole_bias(tokens.key_bias)
        parts = []
        for begin in range(0, len(rows), step := max(fused.FEWEST_ROWS, fused.NUMBERS_AT_ONCE // self.num_tokens)):
            some = slice(begin, begin + step)
            part = None if mask is None else mask[some]
            how = (tokens.keys, key_bias, tau, self.kind, (), part)
            weights = fused.weigh_rows(rows[some], *how, keep=False, score=score).weights
            out = self.quantised.mix(weights if m == weights.shape[1] else weights[:, :m])
            if weights.shape[1] > m:
                out += weights[:, m:].to(tokens.values.dtype) @ tokens.values
            parts.append(out if self.bias is None else out + self.bias)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    def _scores(
        quantised: QuantisedTokens,
        rows: Tensor,
        keys: Tensor,
        key_bias: Tensor | None,
        scale: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        scores = quantised.scores(rows)
        if len(keys):
            scores = torch.cat([scores, (rows @ keys.mT).to(scores.dtype)], dim=1)
        if key_bias is not None:
            scores += key_bias if scale is None else key_bias / scale
        return scores

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.num_quantised} of them {self.quantised.bits}"


def _rows_of_mask(x: Tensor, tokens: Tokens, quantised: int) -> Tensor | None:
    """The mask [rows, n], in which every row has the quantised tokens."""
    if tokens.mask is None:
        return None
    mask = tokens.mask.expand(*x.shape[:-1], -1).reshape(x.shape[:-1].numel(), -1)
    return torch.cat([mask.new_ones(len(mask), quantised), mask], dim=1)


def quantise_layer(layer: Pattention, bits: Bits) -> None:
    """Make integers of a layer's tokens, in place; of a quantised layer, of those that are not yet integers."""
    bias = layer.key_bias is not None
    if isinstance(layer, QuantisedPattention):
        layer.quantised.append(layer.key_tokens, layer.value_tokens, layer.key_bias)
    else:
        like = layer.key_tokens
        shape = (layer.d_in, layer.d_out, layer.num_tokens, bits)
        quantised = QuantisedTokens(*shape, key_bias=bias, device=like.device, dtype=like.dtype)
        if not like.is_meta:
            quantised.fill(layer.key_tokens, layer.value_tokens, layer.key_bias)
        become_quantised(layer, quantised)
    _keep_rows(layer, 0)


def become_quantised(layer: Pattention, quantised: QuantisedTokens) -> None:
    """Let a layer of which the first tokens are integers have only the others in full precision."""
    count = layer.num_tokens - quantised.num_tokens
    layer.__class__ = QuantisedPattention
    assert isinstance(layer, QuantisedPattention)
    layer.quantised = quantised.train(layer.training)
    _keep_rows(layer, count)


def _keep_rows(layer: Pattention, count: int) -> None:
    """Parameters with so many of the last rows; new objects, as an optimizer of the old ones is of no more use."""
    for name in ("key_tokens", "value_tokens", "key_bias"):
        old = getattr(layer, name)
        if old is not None:
            setattr(layer, name, nn.Parameter(old.detach()[len(old) - count :].clone()))
    layer.frozen_tokens = 0


@torch.no_grad()
def dequantise_layer(layer: QuantisedPattention) -> None:
    """Make an ordinary layer of a quantised one, in place."""
    for name, tokens in zip(("key_tokens", "value_tokens", "key_bias"), layer.all_tokens(), strict=True):
        if tokens is not None:
            setattr(layer, name, nn.Parameter(tokens.detach().clone()))
    del layer.quantised
    layer.__class__ = Pattention  # type: ignore[assignment]
