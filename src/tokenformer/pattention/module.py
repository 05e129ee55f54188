"""Pattention as a layer: a drop-in for nn.Linear whose parameters are key and value tokens."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import BadRequestError, did_you_mean
from .functional import KINDS, default_tau, hold, token_weights
from .operator import check_form, pattention

if TYPE_CHECKING:
    from .sizes import Sizes

# What a Pattention's parameters are called that have a row for each token and a column for each channel.
TOKENS = ("key_tokens", "value_tokens")


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


class Tokens(NamedTuple):
    """What a Pattention attends over: keys and values, the keys' bias, how many are frozen, and a mask by row."""

    keys: Tensor
    values: Tensor
    key_bias: Tensor | None
    frozen: int
    mask: Tensor | None = None


class Prefix(NamedTuple):
    """The first tokens of a layer as a layer: how many, and its tau as a share of the whole layer's."""

    num_tokens: int
    tau_factor: float


class Pattention(WideBuffers):
    """Maps [..., d_in] to [..., d_out] by attention over `num_tokens` learnable (key, value) pairs.

    `tau` is fixed when the layer is created and saved with the state: a layer that has grown keeps the scale it was
    trained with, and a reloaded one computes what was saved. It stays in fp32 when the layer is cast lower, because
    bf16 cannot hold √n for most n. The first `frozen_tokens` tokens get no gradient.

    With `top_k`, only so many tokens of a row, the heaviest, mix their values; it is refused in training. With `nested`
    prefixes the rows of a batch, its first dimension, are divided among them in training: each prefix computes an equal
    share of the rows, in their order.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        num_tokens: how many pairs, n.
        kind: how scores become weights, one of `KINDS`.
        tau: the scale of the normalised scores; √n unless given, and n for softmax.
        key_bias: add a learnable number, zero at first, to every token's score. The paper's layers have none.
        bias: add a learnable number, zero at first, to every output. The paper's layers have none.
        form: how it is computed, not what: see `pattention`.
        recompute: save memory by computing the scores again in the backward pass.
        device: where the parameters are made.
        dtype: of the parameters.
    """

    key_bias: nn.Parameter | None
    bias: nn.Parameter | None
    tau: Tensor
    frozen_tokens: int = 0
    top_k: int | None = None
    nested: tuple[Prefix, ...] = ()
    sizes: "Sizes | None" = None  # for a server: sizes.py
    size_name: str = ""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        num_tokens: int,
        kind: str = "l2_gelu",
        tau: float | None = None,
        *,
        key_bias: bool = False,
        bias: bool = False,
        form: str = "auto",
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("d_in", d_in), ("d_out", d_out), ("num_tokens", num_tokens)):
            if size < 1:
                raise BadRequestError(f"Pattention: {name}={size} was given; at least 1 is needed")
        if kind not in KINDS:
            raise BadRequestError(f"Pattention: kind={kind!r} is not known; {did_you_mean(kind, KINDS)}")
        if tau is not None and not tau > 0:
            raise BadRequestError(f"Pattention: tau={tau} was given; a positive number is needed")
        check_form(form, "Pattention: form")
        self.kind, self.form, self.recompute = kind, form, recompute
        self.key_tokens = nn.Parameter(torch.empty(num_tokens, d_in, device=device, dtype=dtype))
        self.value_tokens = nn.Parameter(torch.empty(num_tokens, d_out, device=device, dtype=dtype))
        self.key_bias = nn.Parameter(torch.empty(num_tokens, device=device, dtype=dtype)) if key_bias else None
        self.bias = nn.Parameter(torch.empty(d_out, device=device, dtype=dtype)) if bias else None
        tau = default_tau(num_tokens, kind) if tau is None else float(tau)
        tau_dtype = torch.promote_types(self.key_tokens.dtype, torch.float32)
        self.tau = nn.Buffer(torch.tensor(tau, device=device, dtype=tau_dtype))
        self.reset_parameters()

    @property
    def d_in(self) -> int:
        return self.key_tokens.shape[1]

    @property
    def d_out(self) -> int:
        return self.value_tokens.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.key_tokens.shape[0]

    @property
    def num_quantised(self) -> int:
        """How many of the tokens, from the first, are integers: none, but in a QuantisedPattention."""
        return 0

    def all_tokens(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and key bias of all tokens."""
        return self.key_tokens, self.value_tokens, self.key_bias

    def reset_parameters(self, key_std: float | None = None, value_std: float | None = None) -> None:
        """Draw new tokens. By default keys have variance 1/d_in and values 1/n, so that outputs have one near 0.4."""
        nn.init.normal_(self.key_tokens, std=self.d_in**-0.5 if key_std is None else key_std)
        nn.init.normal_(self.value_tokens, std=self.num_tokens**-0.5 if value_std is None else value_std)
        for bias in (self.key_bias, self.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.top_k is not None:
            raise BadRequestError(
                f"a layer with top_k={self.top_k} was asked to train; top_k is for inference: call eval(), or set "
                "token_top_k to None"
            )
        if self.training and self.nested:
            parts = zip(x.tensor_split(len(self.nested)), self.nested, strict=True)
            of_prefixes = [self._attend(rows, self._tokens(rows, p), self.tau * p.tau_factor) for rows, p in parts]
            out = torch.cat(of_prefixes)
        elif self.sizes is not None and self.sizes.parts:
            out = self.sizes.attend(self, x)
        else:
            out = self._attend(x, self._tokens(x), self.tau)
        groups = self._modules.get("token_groups")
        added = None if groups is None else groups(x)
        return out if added is None else out + added.to(out.dtype)

    def _attend(self, x: Tensor, tokens: "Tokens", tau: Tensor) -> Tensor:
        return pattention(
            x,
            tokens.keys,
            tokens.values,
            tau,
            self.kind,
            key_bias=tokens.key_bias,
            bias=self.bias,
            form=self.form,
            recompute=self.recompute,
            frozen=tokens.frozen,
            mask=tokens.mask,
            top_k=self.top_k,
        )

    def _tokens(self, x: Tensor, prefix: Prefix | None = None) -> "Tokens":
        """Those that share the layer's normaliser for rows x: its own, and of groups that are on (groups.py)."""
        tokens = Tokens(self.key_tokens, self.value_tokens, self.key_bias, self.frozen_tokens)
        if prefix is not None and prefix.num_tokens < self.num_tokens:
            n = prefix.num_tokens
            key_bias = None if self.key_bias is None else self.key_bias[:n]
            tokens = Tokens(self.key_tokens[:n], self.value_tokens[:n], key_bias, min(self.frozen_tokens, n))
        groups: Any = self._modules.get("token_groups")
        return tokens if groups is None else groups.extended(x, tokens)

    def token_weights(self, x: Tensor) -> Tensor:
        """The weight that every token gets in every row of x, [..., n], in fp32 or wider.

        The output is `token_weights(x) @ value_tokens`, plus the bias. `forward` keeps no such array where it can do
        without, so they are computed for this call alone; gradients flow through them. Behind them stand those of token
        groups that share the layer's normaliser.
        """
        tokens = self._tokens(x)
        frozen, mask = tokens.frozen, tokens.mask
        key_bias = None if tokens.key_bias is None else hold(tokens.key_bias, frozen)
        keys = hold(tokens.keys, frozen)
        weights = token_weights(x, keys, self.tau, self.kind, key_bias=key_bias, mask=mask, top_k=self.top_k)
        return weights.full_tensor() if isinstance(weights, DTensor) else weights

    def extra_repr(self) -> str:
        tau = "meta" if self.tau.is_meta else f"{self.tau.item():.4g}"
        biases = "".join(f", {name}=True" for name in ("key_bias", "bias") if getattr(self, name) is not None)
        return f"{self.d_in}, {self.d_out}, num_tokens={self.num_tokens}, kind={self.kind!r}, tau={tau}{biases}"


def pattention_layers(model: nn.Module) -> Iterator[tuple[str, Pattention]]:
    """Every Pattention of a model with its name, each once, in the order of the model."""
    for name, module in model.named_modules():
        if isinstance(module, Pattention):
            yield name, module


def set_submodule(model: nn.Module, name: str, new: Any) -> None:
    """Put `new` where `model` has the module called `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
