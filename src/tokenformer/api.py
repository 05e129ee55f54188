"""The names that `import tokenformer` gives. Importing this registers the models with transformers."""

from . import nn
from .adoption import adopt
from .errors import BadFileError, BadRequestError
from .growth import Growth, grow, grow_optimizer, plan_growth
from .models import (
    PRESETS,
    VISION_PRESETS,
    TokenFormerConfig,
    TokenFormerForCausalLM,
    TokenFormerForImageClassification,
    TokenFormerModel,
    TokenFormerVisionConfig,
    TokenFormerVisionModel,
)
from .pattention import KINDS, Pattention, pattention, pattention_layers, replace_linears

__all__ = [
    "KINDS",
    "PRESETS",
    "VISION_PRESETS",
    "BadFileError",
    "BadRequestError",
    "Growth",
    "Pattention",
    "TokenFormerConfig",
    "TokenFormerForCausalLM",
    "TokenFormerForImageClassification",
    "TokenFormerModel",
    "TokenFormerVisionConfig",
    "TokenFormerVisionModel",
    "adopt",
    "grow",
    "grow_optimizer",
    "nn",
    "pattention",
    "pattention_layers",
    "plan_growth",
    "replace_linears",
]
