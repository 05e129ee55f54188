"""quantize() and dequantize(): the tokens of a model in memory become integers, and numbers again.

quantize(model, "int8")     # every token one scale and integers of eight bits; "int4": of four
dequantize(model)           # an ordinary model again, with the rounded tokens

Enters: any model with Pattentions. Leaves: the same model, changed in place; or a one-line error, with nothing changed.
Embeddings, norms, biases and the output layer stay as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ..errors import BadRequestError, did_you_mean
from ..growth.growable import check_tokens
from ..models import growth_records
from ..pattention import Pattention, pattention_layers
from ..pattention.quantised import BITS, Bits, QuantisedPattention, dequantise_layer, quantise_layer

Model = TypeVar("Model", bound=nn.Module)


def quantize(model: Model, to: str = "int8") -> Model:
    """Make integers of every Pattention's tokens, in place, with one scale for each key and each value.

    A quantised model can grow, and take and merge token groups: new tokens stand in full precision beside the old ones,
    which are never rounded again. Quantised once more, only the new ones are. Make an optimizer afterwards: the
    parameters are new.

    Args:
        model: any module that contains Pattention layers.
        to: int8 or int4.
    """
    check_bits(to, "quantize")
    check_quantisable(model, cast(Bits, to))
    quantise_layers(model, cast(Bits, to))
    for part, counts in quantised_parts(model):
        # Imported when needed: load.py makes what marks a model by way of this file.
        from .load import mark_quantised

        mark_quantised(part, to, counts)
    return model


def check_bits(to: str, what: str) -> None:
    """Refuse what is neither int8 nor int4."""
    if to not in BITS:
        raise BadRequestError(f"{what}: {to!r} was given; {did_you_mean(str(to), BITS)}")


def check_quantisable(model: nn.Module, to: Bits) -> None:
    """Refuse a model whose tokens cannot become integers of so many bits."""
    layers = dict(pattention_layers(model))
    if not layers:
        raise BadRequestError(f"quantize: {type(model).__name__} has no Pattention layer")
    check_tokens(model, "quantize")
    other = next((part for part, _ in growth_records(model) if _quantised_by_others(part)), None)
    if other is not None:
        raise BadRequestError(
            f"quantize: {type(other.hf_quantizer.quantization_config).__name__} has quantised the model already; load "
            "it without, and quantize its tokens alone"
        )
    for name, layer in layers.items():
        if isinstance(layer, QuantisedPattention) and layer.quantised.bits != to:
            raise BadRequestError(
                f"quantize: {name} is {layer.quantised.bits} already, and {to} would round it again; quantise the "
                "model that it was made from"
            )
        for key, tokens in layer.named_parameters(recurse=False):
            if not tokens.is_meta and not torch.isfinite(tokens).all():
                raise BadRequestError(f"quantize: {name}.{key} has NaN or infinite numbers; is the model broken?")
    if all(layer.num_quantised == layer.num_tokens for layer in layers.values()):
        raise BadRequestError(f"quantize: every token is {to} already; nothing is left to do")


def _quantised_by_others(part: Any) -> bool:
    quantizer = getattr(part, "hf_quantizer", None)
    return quantizer is not None and not any(layer.num_quantised for _, layer in pattention_layers(part))


def quantise_layers(model: nn.Module, to: Bits) -> None:
    """Make integers of the tokens of every layer, one layer after the other."""
    for _, layer in pattention_layers(model):
        quantise_layer(layer, to)


def quantised_parts(model: nn.Module) -> list[tuple[Any, Mapping[str, int]]]:
    """The TokenFormers and adopted models within a module; by the names of their layers, how many tokens are integers.

    Names are those in the base model, which are the same with and without a head.
    """
    return [
        (part, {name: layer.num_quantised for name, layer in pattention_layers(part.base_model)})
        for part, _ in growth_records(model)
    ]


def dequantize(model: Model) -> Model:
    """Make an ordinary model of a quantised one, in place: with the rounded tokens, and those that it got since."""
    layers = [layer for _, layer in pattention_layers(model) if isinstance(layer, QuantisedPattention)]
    if not layers:
        raise BadRequestError(f"dequantize: {type(model).__name__} has no token that tokenformer.quantize quantised")
    dequantise_layers(layers)
    for part, _ in growth_records(model):
        if getattr(part, "hf_quantizer", None) is not None:
            part.hf_quantizer.remove_quantization_config(part)
        for module in part.modules():
            getattr(module, "config", part.config).__dict__.pop("_is_quantized", None)
    return model


def dequantise_layers(layers: Sequence[Pattention]) -> None:
    """Make numbers of the integers of these layers."""
    for layer in layers:
        if isinstance(layer, QuantisedPattention):
            dequantise_layer(layer)
