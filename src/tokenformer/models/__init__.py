"""TokenFormer models. Importing this registers them with transformers: Auto classes, Trainer, tensor parallel."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

from .adopted import Adopted, adopted_models, record_of
from .base import TokenFormerPreTrainedModel
from .config import TokenFormerBaseConfig, TokenFormerConfig
from .images import IMAGE_PROCESSORS
from .language import TokenFormerForCausalLM, TokenFormerModel
from .parallel import TokenParallel
from .presets import PRESETS, VISION_PRESETS
from .vision import TokenFormerForImageClassification, TokenFormerVisionModel
from .vision_config import TokenFormerVisionConfig

AutoConfig.register(TokenFormerConfig.model_type, TokenFormerConfig)
AutoModel.register(TokenFormerConfig, TokenFormerModel)
AutoModelForCausalLM.register(TokenFormerConfig, TokenFormerForCausalLM)
AutoConfig.register(TokenFormerVisionConfig.model_type, TokenFormerVisionConfig)
AutoModel.register(TokenFormerVisionConfig, TokenFormerVisionModel)
AutoModelForImageClassification.register(TokenFormerVisionConfig, TokenFormerForImageClassification)
# By name and not through AutoImageProcessor.register, which wants the classes, and they want Pillow.
IMAGE_PROCESSOR_MAPPING.register(TokenFormerVisionConfig, IMAGE_PROCESSORS)  # type: ignore[arg-type]
# `register` does not fill these lists. By the first Trainer knows whose labels to shift when it smooths them, by the
# second the pipeline which models it takes.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TokenFormerConfig.model_type] = TokenFormerForCausalLM.__name__
MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES[TokenFormerVisionConfig.model_type] = (
    TokenFormerForImageClassification.__name__
)
ALL_PARALLEL_STYLES.register("parameter_tokens", TokenParallel())  # type: ignore[arg-type]

__all__ = [
    "PRESETS",
    "VISION_PRESETS",
    "Adopted",
    "TokenFormerBaseConfig",
    "TokenFormerConfig",
    "TokenFormerForCausalLM",
    "TokenFormerForImageClassification",
    "TokenFormerModel",
    "TokenFormerPreTrainedModel",
    "TokenFormerVisionConfig",
    "TokenFormerVisionModel",
    "adopted_models",
    "record_of",
]
