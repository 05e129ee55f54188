"""TokenFormer models. Importing this registers them with transformers: Auto classes, Trainer, tensor parallel."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from .adopted import Adopted, growth_records, record_of
from .adopted_classes import AdoptedConfig
from .base import TokenFormerPreTrainedModel, TokenParallel, name_in_transformers
from .config import PRESETS, VISION_PRESETS, TokenFormerBaseConfig, TokenFormerConfig, TokenFormerVisionConfig
from .images import IMAGE_PROCESSORS
from .inference import for_inference, for_training
from .language import (
    TokenFormerForCausalLM,
    TokenFormerForQuestionAnswering,
    TokenFormerForSequenceClassification,
    TokenFormerForTokenClassification,
    TokenFormerModel,
)
from .vision import TokenFormerForImageClassification, TokenFormerVisionModel

AutoConfig.register(TokenFormerConfig.model_type, TokenFormerConfig)
AutoModel.register(TokenFormerConfig, TokenFormerModel)
AutoConfig.register(TokenFormerVisionConfig.model_type, TokenFormerVisionConfig)
AutoModel.register(TokenFormerVisionConfig, TokenFormerVisionModel)
# By name, not through AutoImageProcessor.register, which needs the classes, and those need Pillow.
IMAGE_PROCESSOR_MAPPING.register(TokenFormerVisionConfig, IMAGE_PROCESSORS)  # type: ignore[arg-type]
# `register` does not fill the lists of names, which tell pipelines which models they can take, and Trainer whose labels
# to shift when it smooths them.
for _config, _model, _auto, _names in (
    (TokenFormerConfig, TokenFormerForCausalLM, AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (
        TokenFormerConfig,
        TokenFormerForSequenceClassification,
        AutoModelForSequenceClassification,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
    (
        TokenFormerConfig,
        TokenFormerForTokenClassification,
        AutoModelForTokenClassification,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ),
    (
        TokenFormerConfig,
        TokenFormerForQuestionAnswering,
        AutoModelForQuestionAnswering,
        MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    ),
    (
        TokenFormerVisionConfig,
        TokenFormerForImageClassification,
        AutoModelForImageClassification,
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    ),
):
    _auto.register(_config, _model)
    _names[_config.model_type] = _model.__name__
    name_in_transformers(_model)
for _headless in (TokenFormerModel, TokenFormerVisionModel):
    name_in_transformers(_headless)
AutoConfig.register(AdoptedConfig.model_type, AdoptedConfig)
ALL_PARALLEL_STYLES.register("parameter_tokens", TokenParallel())  # type: ignore[arg-type]

__all__ = [
    "PRESETS",
    "VISION_PRESETS",
    "Adopted",
    "TokenFormerBaseConfig",
    "TokenFormerConfig",
    "TokenFormerForCausalLM",
    "TokenFormerForImageClassification",
    "TokenFormerForQuestionAnswering",
    "TokenFormerForSequenceClassification",
    "TokenFormerForTokenClassification",
    "TokenFormerModel",
    "TokenFormerPreTrainedModel",
    "TokenFormerVisionConfig",
    "TokenFormerVisionModel",
    "for_inference",
    "for_training",
    "growth_records",
    "record_of",
]
