"""Quantised models in transformers: saved by save_pretrained, loaded by from_pretrained, or quantised as they load.

    AutoModelForCausalLM.from_pretrained("models/mine", quantization_config=TokenFormerQuantConfig("int8"))
    AutoModelForCausalLM.from_pretrained("models/mine-int8")

Enters: transformers' call of its hooks with a model, before its weights are loaded and after. Leaves: a model with
QuantisedPattentions. config.json has, as `quantization_config`, the dtype and how many tokens of each layer are
integers; those that a layer has beyond them are in full precision.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import BadFileError
from ..models.loading import INTEGERS
from ..pattention import Pattention, pattention_layers
from ..pattention.quantised import Bits, QuantisedPattention, QuantisedTokens, become_quantised
from ..pattention.quantised_linear import IntegerLinear, use_integers
from .quantise import check_bits, check_quantisable, dequantise_layers, output_layers, quantise_layers, quantised_parts


@register_quantization_config(INTEGERS)
class TokenFormerQuantConfig(QuantizationConfigMixin):
    """How a model's tokens are quantised, for from_pretrained.

    Args:
        dtype: int8 or int4.
        layers: of a quantised model, how many tokens of each layer are integers; filled in when it is made.
        output_layer: whether the output layer multiplies by integers, too; as in `quantize`.
    """

    def __init__(
        self, dtype: str = "int8", layers: Mapping[str, int] | None = None, output_layer: bool = False, **_: Any
    ) -> None:
        check_bits(dtype, "TokenFormerQuantConfig")
        self.quant_method: Any = INTEGERS
        self.dtype = dtype
        self.layers = dict(layers or {})
        self.output_layer = bool(output_layer)


@register_quantizer(INTEGERS)
class TokenQuantizer(HfQuantizer):
    """transformers' hook for such models."""

    quantization_config: TokenFormerQuantConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self.pre_quantized:
            _make_room(model, self.quantization_config)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            bits = cast(Bits, self.quantization_config.dtype)
            # transformers has put its mark on the model already.
            del model.hf_quantizer
            check_quantisable(model, bits)
            outputs = output_layers(model) if self.quantization_config.output_layer else []
            quantise_layers(model, bits)
            use_integers(*outputs)
            ((_, counts),) = quantised_parts(model)
            mark_quantised(model, bits, counts)
        elif self.quantization_config.output_layer and isinstance(model.get_output_embeddings(), nn.Linear):
            use_integers(model.get_output_embeddings())  # which a model without its head has not
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        dequantise_layers([layer for _, layer in pattention_layers(model)])
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """To Trainer: tokens that were added, groups and all else are trained, without an adapter of peft's."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def mark_quantised(model: Any, dtype: str, counts: Mapping[str, int]) -> None:
    """Let transformers know that a model is quantised, so that it is saved as such."""
    output_layer = any(isinstance(module, IntegerLinear) for module in model.modules())
    config = TokenFormerQuantConfig(dtype, counts, output_layer)
    model.hf_quantizer = TokenQuantizer(config)
    model.config.quantization_config = config
    model.is_quantized, model.quantization_method = True, INTEGERS


def _make_room(model: PreTrainedModel, config: TokenFormerQuantConfig) -> None:
    """Give every layer that the configuration names integers for its first tokens, for their numbers to be loaded."""
    modules = dict(model.base_model.named_modules())
    for name, count in config.layers.items():
        layer = modules.get(name)
        fits = isinstance(layer, Pattention) and isinstance(count, int) and 0 < count <= layer.num_tokens
        if not fits or isinstance(layer, QuantisedPattention):
            raise BadFileError(
                f"quantization_config in config.json has {count} quantised tokens in {name}, which does not fit the "
                "model that the file describes"
            )
        assert isinstance(layer, Pattention)
        like = layer.key_tokens
        shape = (layer.d_in, layer.d_out, count, cast(Bits, config.dtype))
        key_bias = layer.key_bias is not None
        become_quantised(layer, QuantisedTokens(*shape, key_bias=key_bias, device=like.device, dtype=like.dtype))
