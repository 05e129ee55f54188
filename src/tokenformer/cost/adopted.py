"""What adopted layers cost, beside what they replaced. Enters: the record of an adopted model. Leaves: numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..models import Adopted


@dataclass(frozen=True)
class LayerCosts:
    """The adopted layers of a model: their parameters, numbers in their matrices, and FLOPs a token.

    `replaced_…` is the same of the linears that stood there. `cost.parameters` counts the model as a whole, if it is a
    GPT-NeoX or a ViT.
    """

    parameters: int
    numbers: int
    flops_per_token: int
    replaced_numbers: int
    replaced_flops_per_token: int


def layer_numbers(layer: Mapping[str, Any]) -> int:
    """The numbers in a Pattention's keys and values."""
    return layer["num_tokens"] * (layer["d_in"] + layer["d_out"])


def layer_biases(layer: Mapping[str, Any]) -> int:
    """The numbers in its biases, if it has them."""
    return layer["num_tokens"] * layer["key_bias"] + layer["d_out"] * layer["bias"]


def layer_parameters(layer: Mapping[str, Any]) -> int:
    """All of them."""
    return layer_numbers(layer) + layer_biases(layer)


def adopted_layers(record: Adopted) -> LayerCosts:
    """Of all adopted layers together."""
    layers = list(record.layers.values())
    replaced = sum(layer["replaced"] for layer in layers)
    numbers = sum(map(layer_numbers, layers))
    return LayerCosts(
        parameters=sum(map(layer_parameters, layers)),
        numbers=numbers,
        flops_per_token=2 * numbers,
        replaced_numbers=replaced,
        replaced_flops_per_token=2 * replaced,
    )
