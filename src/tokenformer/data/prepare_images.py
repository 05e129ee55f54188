"""prepare_images: a configuration to datasets of pixels and labels.

Enters: ImageConfig. Leaves: PreparedImages: datasets for training, validation and test, the names of the classes, and
the collate function. Images stay where they are, encoded; only labels are read here, and, to hold some out, every image
once, undecoded: a seeded hash of the content chooses, so that copies of one image are on one side.
"""

import hashlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ..errors import BadRequestError
from .augment import load_kornia
from .config import PARTS
from .encode import available_cores
from .image_config import ImageConfig, check_image_config
from .image_data import ImageData, load_pillow, shorter_side
from .image_sources import Gallery, find_images
from .mix import ImageCollator
from .split import seeded


@dataclass
class PreparedImages:
    """What training needs.

    collate: the collate_fn for all three datasets; it mixes and smooths those samples that `augmented` gave.
    stats: images of each part.
    key: stands for classes, labels, the images' names or sizes, and what is held out.
    processor: preprocessor_config.json for a model's folder: what validation does, in transformers' words.
    workers: processes that shall decode and augment.
    """

    train: ImageData
    validation: ImageData | None
    test: ImageData | None
    id2label: dict[int, str]
    collate: ImageCollator
    stats: dict[str, int]
    key: str
    processor: dict[str, Any]
    workers: int

    @property
    def num_labels(self) -> int:
        """How many classes there are."""
        return len(self.id2label)


def prepare_images(config: ImageConfig) -> PreparedImages:
    """Find the images and their classes, and hold some out."""
    check_image_config(config)
    load_pillow()
    if config.augment.rand_augment:
        load_kornia()
    gallery = find_images(config)
    fingerprints = [gallery.fingerprint]
    parts = {part: ImageData(gallery, rows, config) for part, rows in _parted(gallery, config).items()}
    if config.validation is not None:
        held_out = find_images(config, "validation", gallery)
        fingerprints.append(held_out.fingerprint)
        parts["validation"] = ImageData(held_out, np.arange(len(held_out)), config)
    whole = hashlib.blake2b(" ".join(fingerprints).encode(), digest_size=16)
    for data in parts.values():
        whole.update(data.rows.tobytes())
    return PreparedImages(
        train=parts["train"],
        validation=parts.get("validation"),
        test=parts.get("test"),
        id2label=dict(enumerate(gallery.names)),
        collate=ImageCollator(len(gallery.names), config.augment, config.seed),
        stats={part: len(data) for part, data in parts.items()},
        key=whole.hexdigest(),
        processor=image_processor(config),
        workers=available_cores() if config.workers is None else config.workers,
    )


def _parted(gallery: Gallery, config: ImageConfig) -> dict[str, np.ndarray]:
    """The rows of each part that comes from the training images, in their order."""
    shares = config.split or [1 - config.validation_fraction, config.validation_fraction]
    if config.validation is not None or shares[1] == 0:
        return {"train": np.arange(len(gallery))}
    part_of = assign_parts(gallery.digests(), shares, config.split_seed)
    parts = {PARTS[i]: np.flatnonzero(part_of == i) for i in range(len(shares))}
    for part, rows in parts.items():
        if not len(rows):
            raise BadRequestError(
                f"{len(gallery)} images are too few, or copies of too few, to give {part} a share of "
                f"{shares[PARTS.index(part)]:g}; give more, other shares, or validation images"
            )
    return parts


def assign_parts(digests: np.ndarray, shares: list[float], seed: int) -> np.ndarray:
    """The part of each image: 0, 1, … in the order of their seeded hashes, at least one for all but the first.

    Not by position, as text is cut: images often come sorted by class.
    """
    hashes = seeded(digests, seed)
    ascending = np.sort(hashes)
    sizes = [max(1, round(share * len(hashes))) for share in shares[1:]]
    # Below the first bound is the last part, and so on; copies have one hash and stay together.
    bounds = ascending[np.minimum(list(accumulate(reversed(sizes))), len(ascending) - 1)]
    part_of = np.zeros(len(hashes), np.int64)
    for bound in bounds:
        part_of += hashes < bound
    return part_of


def image_processor(config: ImageConfig) -> dict[str, Any]:
    """The settings of a transformers image processor that does what `ImageData` does for validation."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": config.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": shorter_side(config)},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": config.size, "width": config.size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": config.pixel_mean,
        "image_std": config.pixel_std,
    }
