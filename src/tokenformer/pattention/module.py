"""Pattention as a layer: a drop-in for nn.Linear whose parameters are key and value tokens."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadRequestError, did_you_mean
from .functional import KINDS, default_tau
from .operator import check_form, pattention
from .wide import WideBuffers


class Pattention(WideBuffers):
    """Maps [..., d_in] to [..., d_out] by attention over `num_tokens` learnable (key, value) pairs.

    `tau` is fixed at birth and saved with the state: a layer that has grown keeps the scale it was trained
    with, and a reloaded one computes what was saved. It stays in fp32 when the layer is cast lower, because
    bf16 cannot hold √n for most n.

    `key_bias` adds a learnable number to every token's score, `bias` one to every output; the paper's layers have
    neither, and both start at zero. `form` and `recompute` say how it is computed, not what: see `pattention`. The
    first `frozen_tokens` tokens get no gradient.
    """

    key_bias: nn.Parameter | None
    bias: nn.Parameter | None
    tau: Tensor
    frozen_tokens: int = 0

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

    def reset_parameters(self, key_std: float | None = None, value_std: float | None = None) -> None:
        """Draw new tokens. By default values have variance 1/n, which gives outputs one near 0.4, and keys 1/d_in."""
        nn.init.normal_(self.key_tokens, std=self.d_in**-0.5 if key_std is None else key_std)
        nn.init.normal_(self.value_tokens, std=self.num_tokens**-0.5 if value_std is None else value_std)
        for bias in (self.key_bias, self.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return pattention(
            x,
            self.key_tokens,
            self.value_tokens,
            self.tau,
            self.kind,
            key_bias=self.key_bias,
            bias=self.bias,
            form=self.form,
            recompute=self.recompute,
            frozen=self.frozen_tokens,
        )

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
