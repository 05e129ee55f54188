"""Neural networks whose parameters are tokens. `import tokenformer` registers the models with transformers.

Pattention, replace_linears                the layer, and the swap that puts it into any torch model
tokenformer.pattention                     the same as functions; how they are computed
record_token_weights                       which tokens a model uses
tokenformer.nn                             torch's Transformer layers with Pattention inside
TokenFormerConfig, TokenFormerForCausalLM  the language model; also For… SequenceClassification, TokenClassification
                                           and QuestionAnswering
TokenFormerVisionConfig,
TokenFormerForImageClassification          the vision model
for_inference, for_training                a model that generates faster, and the one that it was
ungrow                                     the model before its last growth step
grow, grow_optimizer                       a larger model that computes exactly what the smaller one did
rank_tokens, sort_tokens, shrink           a smaller model, without the tokens that do least
quantize, dequantize,
TokenFormerQuantConfig                     tokens as integers of eight or four bits, beside which a model still grows
parameter_groups                           learning rates that follow the size of a layer
add_tokens, load_tokens, save_tokens,
use_tokens, train_tokens, merge_tokens,
remove_tokens, token_groups,
tokens_by_row, choose_tokens               named groups of tokens beside the layers of any model
watch, ablate                              what every token does, and what a model does without it
attribute, token_statistics                what it adds to a logit; how much it does over data, and when
index_tokens, TokenIndex                   what makes every token fire, in a folder
edit                                       one fact written as one token
adopt                                      a transformers model becomes a TokenFormer that computes the same
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from . import integrations as integrations  # by which other tools learn of tokens
from . import nn
from .adoption import adopt
from .errors import BadFileError, BadRequestError
from .groups import (
    add_tokens,
    choose_tokens,
    load_tokens,
    merge_tokens,
    remove_tokens,
    save_tokens,
    token_groups,
    tokens_by_row,
    train_tokens,
    use_tokens,
)
from .growth import Growth, grow, grow_optimizer, parameter_groups, plan_growth, ungrow
from .inside import TokenIndex, ablate, attribute, edit, index_tokens, token_statistics, watch
from .models import (
    PRESETS,
    VISION_PRESETS,
    TokenFormerConfig,
    TokenFormerForCausalLM,
    TokenFormerForImageClassification,
    TokenFormerForQuestionAnswering,
    TokenFormerForSequenceClassification,
    TokenFormerForTokenClassification,
    TokenFormerModel,
    TokenFormerVisionConfig,
    TokenFormerVisionModel,
    for_inference,
    for_training,
)
from .pattention import KINDS, Pattention, pattention_layers, record_token_weights, replace_linears
from .quantisation import TokenFormerQuantConfig, dequantize, quantize
from .shrinking import rank_tokens, shrink, sort_tokens

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
    "TokenFormerForQuestionAnswering",
    "TokenFormerForSequenceClassification",
    "TokenFormerForTokenClassification",
    "TokenFormerModel",
    "TokenFormerQuantConfig",
    "TokenFormerVisionConfig",
    "TokenFormerVisionModel",
    "TokenIndex",
    "ablate",
    "add_tokens",
    "adopt",
    "attribute",
    "choose_tokens",
    "dequantize",
    "edit",
    "for_inference",
    "for_training",
    "grow",
    "grow_optimizer",
    "index_tokens",
    "load_tokens",
    "merge_tokens",
    "nn",
    "parameter_groups",
    "pattention_layers",
    "plan_growth",
    "quantize",
    "rank_tokens",
    "record_token_weights",
    "remove_tokens",
    "replace_linears",
    "save_tokens",
    "shrink",
    "sort_tokens",
    "token_groups",
    "token_statistics",
    "tokens_by_row",
    "train_tokens",
    "ungrow",
    "use_tokens",
    "watch",
]

__version__ = version("tokenformer")
# Imported when they are first asked for, so that `tokenformer.cost` needs no import of its own.
_PARTS = ("cost", "data", "evaluation", "exporting", "official", "report", "training")

if not TYPE_CHECKING:  # to a type checker every name would exist

    def __getattr__(name: str) -> Any:
        if name in _PARTS:
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
