"""Text to blocks of token ids, images to pixels and labels: sources, splits, the cache, streams. See docs/data.md."""

from .config import DataConfig
from .image_config import AugmentConfig, ImageConfig
from .image_data import ImageData
from .image_sources import Gallery, find_images
from .mix import ImageCollator
from .prepare import PreparedData, prepare
from .prepare_images import PreparedImages, prepare_images
from .stream import BlockStream
from .tokenizer import load_tokenizer, train_tokenizer

__all__ = [
    "AugmentConfig",
    "BlockStream",
    "DataConfig",
    "Gallery",
    "ImageCollator",
    "ImageConfig",
    "ImageData",
    "PreparedData",
    "PreparedImages",
    "find_images",
    "load_tokenizer",
    "prepare",
    "prepare_images",
    "train_tokenizer",
]
