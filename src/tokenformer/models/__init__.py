"""TokenFormer models. Importing this registers them with transformers: Auto classes, Trainer, tensor parallel."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .adopted import Adopted, adopted_models, record_of
from .config import TokenFormerConfig
from .language import TokenFormerForCausalLM, TokenFormerModel, TokenFormerPreTrainedModel
from .parallel import TokenParallel
from .presets import PRESETS

AutoConfig.register(TokenFormerConfig.model_type, TokenFormerConfig)
AutoModel.register(TokenFormerConfig, TokenFormerModel)
AutoModelForCausalLM.register(TokenFormerConfig, TokenFormerForCausalLM)
# `register` does not fill this list, by which Trainer knows whose labels to shift when it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TokenFormerConfig.model_type] = TokenFormerForCausalLM.__name__
ALL_PARALLEL_STYLES.register("parameter_tokens", TokenParallel())  # type: ignore[arg-type]

__all__ = [
    "PRESETS",
    "Adopted",
    "TokenFormerConfig",
    "TokenFormerForCausalLM",
    "TokenFormerModel",
    "TokenFormerPreTrainedModel",
    "adopted_models",
    "record_of",
]
