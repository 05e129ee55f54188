"""What tools that quantise linear layers leave of a model with Pattentions, or break in it, in a warning."""

import warnings

import torch
from torch import nn

from ..pattention import pattention_layers


def warn_of_unquantised_tokens(model: nn.Module, tool: str) -> None:
    """Warn if a tool, which has just quantised the model, left parameter tokens as they were."""
    tokens = [t for _, layer in pattention_layers(model) for t in (layer.key_tokens, layer.value_tokens)]
    # Quantised ones have a class of their own; of layers that are quantised by us, parameters are what has grown since.
    plain = [tensor for tensor in tokens if type(tensor) is nn.Parameter and tensor.numel()]
    if plain:
        numbers = sum(tensor.numel() for tensor in plain)
        warnings.warn(
            f"{tool} quantises linear layers only: it left {len(plain)} of {len(tokens)} tensors of parameter tokens "
            f"({numbers:,} numbers) as they were. tokenformer.quantize(model, 'int8') reaches them, and "
            "from_pretrained(…, quantization_config=tokenformer.TokenFormerQuantConfig('int8')): docs/quantisation.md",
            stacklevel=3,
        )
    warn_of_zeros_made_nan(model, tool)


def warn_of_zeros_made_nan(model: nn.Module, tool: str) -> None:
    """Warn if a quantiser divided rows of zeros by their largest number."""
    tokens = [t for _, layer in pattention_layers(model) for t in (layer.key_tokens, layer.value_tokens)]
    quantised = [tensor for tensor in tokens if type(tensor) is not nn.Parameter and hasattr(tensor, "dequantize")]
    broken = sum(not torch.isfinite(tensor.dequantize()).all() for tensor in quantised)
    if broken:
        warnings.warn(
            f"{tool} made NaN of zeros in {broken} of {len(tokens)} tensors of parameter tokens, whose rows have no "
            "scale: new tokens are zero until they are trained, and ballast always is. Quantise before growing or "
            "after training on, and not what was adopted",
            stacklevel=3,
        )
