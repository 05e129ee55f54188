"""Torch's attention and Transformer layers with Pattention inside: change the import, keep the code."""

from ..pattention import Pattention
from .attention import MultiheadAttention
from .transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = ["MultiheadAttention", "Pattention", "TransformerDecoderLayer", "TransformerEncoderLayer"]
