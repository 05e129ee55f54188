"""Text to blocks of token ids: sources, splits, tokenizers, packing, the cache, and streams. See docs/data.md."""

from .config import DataConfig
from .prepare import PreparedData, prepare
from .stream import BlockStream
from .tokenizer import load_tokenizer, train_tokenizer

__all__ = ["BlockStream", "DataConfig", "PreparedData", "load_tokenizer", "prepare", "train_tokenizer"]
