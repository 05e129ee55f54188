"""Token-parameter attention: the function, the layer, and the swap that puts the layer into any model."""

from .functional import KINDS, default_tau
from .module import TOKENS, Pattention, pattention_layers
from .operator import pattention
from .recording import record_token_weights
from .replace import replace_linears

__all__ = [
    "KINDS",
    "TOKENS",
    "Pattention",
    "default_tau",
    "pattention",
    "pattention_layers",
    "record_token_weights",
    "replace_linears",
]
