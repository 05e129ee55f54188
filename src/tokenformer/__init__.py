"""Neural networks whose parameters are tokens. `import tokenformer` registers the models with transformers.

pattention, Pattention, replace_linears    the layer, and the swap that puts it into any torch model
tokenformer.nn                             torch's Transformer layers with Pattention inside
TokenFormerConfig, TokenFormerForCausalLM  the language model
grow, grow_optimizer                       a larger model that computes exactly what the smaller one did
"""

from . import nn
from .errors import BadFileError, BadRequestError
from .growth import Growth, grow, grow_optimizer, plan_growth
from .models import PRESETS, TokenFormerConfig, TokenFormerForCausalLM, TokenFormerModel
from .pattention import KINDS, Pattention, pattention, pattention_layers, replace_linears

__version__ = "0.1.0"

__all__ = [
    "KINDS",
    "PRESETS",
    "BadFileError",
    "BadRequestError",
    "Growth",
    "Pattention",
    "TokenFormerConfig",
    "TokenFormerForCausalLM",
    "TokenFormerModel",
    "grow",
    "grow_optimizer",
    "nn",
    "pattention",
    "pattention_layers",
    "plan_growth",
    "replace_linears",
]
