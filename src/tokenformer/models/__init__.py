"""TokenFormer models. Importing this registers them with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .config import TokenFormerConfig
from .language import TokenFormerForCausalLM, TokenFormerModel, TokenFormerPreTrainedModel
from .presets import PRESETS

AutoConfig.register(TokenFormerConfig.model_type, TokenFormerConfig)
AutoModel.register(TokenFormerConfig, TokenFormerModel)
AutoModelForCausalLM.register(TokenFormerConfig, TokenFormerForCausalLM)

__all__ = [
    "PRESETS",
    "TokenFormerConfig",
    "TokenFormerForCausalLM",
    "TokenFormerModel",
    "TokenFormerPreTrainedModel",
]
