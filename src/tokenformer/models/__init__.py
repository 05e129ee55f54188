"""TokenFormer models. Importing this registers them with transformers' Auto classes and tensor parallelism."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from .config import TokenFormerConfig
from .language import TokenFormerForCausalLM, TokenFormerModel, TokenFormerPreTrainedModel
from .parallel import TokenParallel
from .presets import PRESETS

AutoConfig.register(TokenFormerConfig.model_type, TokenFormerConfig)
AutoModel.register(TokenFormerConfig, TokenFormerModel)
AutoModelForCausalLM.register(TokenFormerConfig, TokenFormerForCausalLM)
ALL_PARALLEL_STYLES.register("parameter_tokens", TokenParallel())

__all__ = [
    "PRESETS",
    "TokenFormerConfig",
    "TokenFormerForCausalLM",
    "TokenFormerModel",
    "TokenFormerPreTrainedModel",
]
