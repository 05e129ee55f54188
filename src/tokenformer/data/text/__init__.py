"""Text to blocks of token ids: sources -> documents -> split -> tokenizer -> packing, or a stream of all that."""

from .data import TextData
from .settings import TextSettings
from .stream import BlockStream
from .tokenizer import load_tokenizer, train_tokenizer

__all__ = ["BlockStream", "TextData", "TextSettings", "load_tokenizer", "train_tokenizer"]
