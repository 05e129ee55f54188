"""CIFAR-10 for the experiments: images of a step, and those that are held out.

Enters: ../shared/data/cifar10, or the folder that CIFAR10 names, with train.parquet and test.parquet. Leaves: batches
of pixels and labels. A tenth of the training images is held out for validation. Which image is sample i of a run is
decided by the run's seed; how it is cropped and mirrored, by i alone. Every picture is decoded once, in the pool's
process, whose forks share it.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from tokenformer.data.images import AugmentedInOrder, ImageData, ImageSettings
from tokenformer.data.images.pictures import open_picture
from tokenformer.data.images.settings import AugmentSettings
from tokenformer.data.images.sources import Gallery


@cache
def read(part: str) -> ImageData:
    """The training images with what is held out of them, or the test images."""
    folder = Path(os.environ.get("CIFAR10", Path(__file__).parents[3] / "shared" / "data" / "cifar10"))
    path = folder / f"{part}.parquet"
    if not path.exists():
        raise SystemExit(f"{path} does not exist; let CIFAR10 name a folder with train.parquet and test.parquet")
    settings = ImageSettings(
        images=str(path),
        normalise="cifar10",
        validation_fraction=0.1 if part == "train" else 0.0,
        workers=0,
        augment=AugmentSettings(flip=0.5, crop_padding=4),
    )
    prepared = ImageData(settings).prepare()
    decoded = Decoded(prepared.train.gallery)
    for data in (prepared.train, prepared.validation):
        if data is not None:
            data.gallery = decoded
    return prepared


class Decoded(Gallery):
    """The same pictures as arrays of pixels: decoding them anew would be half of the time that a batch takes."""

    def __init__(self, gallery: Gallery) -> None:
        super().__init__(gallery.sources, gallery.names, gallery.labels)
        self.pixels = np.stack([np.asarray(open_picture(gallery, row, channels=3)) for row in range(len(gallery))])

    def encoded(self, row: int) -> Any:
        return self.pixels[row]


class ImageTask:
    """What is trained on, and what is looked at besides."""

    def __init__(self, batch: int, seed: int, samples: int) -> None:
        self.size, self.prepared, self.test = batch, read("train"), read("test").train
        self.images = AugmentedInOrder(self.prepared.train, samples, seed)

    def batch(self, step: int) -> dict[str, Any]:
        """The images of a step."""
        return self.prepared.collate([self.images[step * self.size + i] for i in range(self.size)])

    def held_out(self, part: str, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The test images, or 8 · `count` of those for validation, in batches, each with its size."""
        if part == "test":
            images: Any = self.test
            wanted = torch.arange(len(images))
        else:
            images = self.prepared.validation
            wanted = torch.linspace(0, len(images) - 1, min(8 * count, len(images))).long().unique()
        for rows in wanted.split(128):
            yield len(rows), self.prepared.collate(list(Subset(images, rows.tolist())))
