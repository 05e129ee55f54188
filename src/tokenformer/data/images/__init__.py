"""Images to pixels and labels: sources -> tables -> pictures -> augment."""

from .augment import ImageCollator
from .data import AugmentedInOrder, ImageData
from .pictures import Pictures
from .settings import AugmentSettings, ImageSettings
from .sources import Gallery, find_images

__all__ = [
    "AugmentSettings",
    "AugmentedInOrder",
    "Gallery",
    "ImageCollator",
    "ImageData",
    "ImageSettings",
    "Pictures",
    "find_images",
]
