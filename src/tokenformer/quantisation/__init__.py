"""Tokens as integers of eight or four bits: models that need a quarter or an eighth of the memory, and grow."""

from .load import TokenFormerQuantConfig
from .quantise import dequantize, quantize

__all__ = ["TokenFormerQuantConfig", "dequantize", "quantize"]
