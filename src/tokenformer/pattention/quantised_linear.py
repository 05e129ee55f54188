"""A linear layer that multiplies by integers wherever no gradient is wanted: for the output layer of a language model.

Enters: rows [..., d_in]. Leaves: [..., d_out]. The layer keeps its weight, which it may share with an embedding, and
trains and saves it as ever. Beside it stand integers of eight bits, with one scale for each output, made anew when the
weight has changed. Elsewhere, compiled and exported, the weight itself is multiplied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .inference import InferenceLinear, is_plain_inference
from .integer_products import can_be_exact, exact_product
from .operator import chosen_form
from .quantised import QuantisedPattention, rounded


class IntegerLinear(nn.Linear):
    """Not made, but an existing layer becomes one: `use_integers`."""

    form: str = "auto"

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        if not self._can_round(rows):
            return InferenceLinear.forward(self, input)  # type: ignore[arg-type]
        codes, scales = self.integers()
        out = exact_product(rows, codes).mul_(scales)
        out = out if self.bias is None else out.add_(self.bias)
        return out.view(*input.shape[:-1], -1)

    def _can_round(self, rows: Tensor) -> bool:
        if chosen_form(self.form) == "reference" or not rows.numel() or rows.dtype != torch.float32:
            return False
        if not is_plain_inference((rows, self.weight, self.weight, None, self.bias)):
            return False
        return self.weight.dtype == torch.float32 and can_be_exact(rows)

    def integers(self) -> tuple[Tensor, Tensor]:
        """Of the weight as it is now: int8 [d_out, d_in], and scales [d_out]."""
        state = (self.weight.data_ptr(), 0 if self.weight.is_inference() else self.weight._version)
        made: Any = self.__dict__.get("_integers")
        if made is None or made[0] != state:
            made = (state, rounded(self.weight, "int8"))
            self.__dict__["_integers"] = made
        return made[1]

    def __getstate__(self) -> dict[str, Any]:
        """What is copied or pickled makes integers of its own."""
        return {key: value for key, value in self.__dict__.items() if key != "_integers"}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8"


def use_integers(*layers: nn.Linear) -> None:
    """Let layers multiply by integers."""
    for layer in layers:
        layer.__class__ = IntegerLinear


def use_numbers(layer: nn.Linear) -> None:
    """Take it back."""
    layer.__dict__.pop("_integers", None)
    layer.__dict__.pop("form", None)
    layer.__class__ = nn.Linear


@contextmanager
def plainly(model: nn.Module) -> Iterator[None]:
    """Inside, layers with integers compute as the specification does, to compare models to the last digits."""
    kinds = (QuantisedPattention, IntegerLinear)
    forms = {layer: layer.form for layer in model.modules() if isinstance(layer, kinds)}
    try:
        for layer in forms:
            layer.form = "reference"
        yield
    finally:
        for layer, form in forms.items():
            layer.form = form
