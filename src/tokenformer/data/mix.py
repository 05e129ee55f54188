"""Samples to batches: mixup, cutmix and smoothed labels.

Enters: a list of samples, with their places in the run's order if they are for training. Leaves: pixel_values
[batch, channels, size, size] and labels: classes [batch], or shares of them [batch, classes] if images are mixed or
labels smoothed. Samples 2k and 2k + 1 of the run are partners, and what is done to them follows from (seed, k), so that
it does not matter how the run is cut into batches, as long as these are even.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import BadRequestError
from .augment import FOR_PAIRS, generator
from .image_config import AugmentConfig

Sample = dict[str, Any]


class ImageCollator:
    """The collate_fn of a data loader, for training and, where samples have no place in a run, for validation."""

    def __init__(self, num_labels: int, augment: AugmentConfig, seed: int) -> None:
        self.num_labels, self.augment, self.seed = num_labels, augment, seed

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        pixels = torch.stack([sample["pixel_values"] for sample in samples])  # [batch, channels, size, size]
        labels = torch.tensor([sample["labels"] for sample in samples])  # [batch]
        if "sample" not in samples[0] or not (self.augment.mixes or self.augment.label_smoothing):
            return {"pixel_values": pixels, "labels": labels}
        smoothing = self.augment.label_smoothing
        shares = F.one_hot(labels, self.num_labels) * (1 - smoothing) + smoothing / self.num_labels
        if self.augment.mixes:
            places = [sample["sample"] for sample in samples]
            check_even_batch(len(places))
            for first in range(0, len(places), 2):
                if places[first] % 2 or places[first + 1] != places[first] + 1:
                    raise BadRequestError(
                        f"samples {places[first]} and {places[first + 1]} meet in a batch; mixup and cutmix need the "
                        "run's order, uncut between samples 2k and 2k + 1"
                    )
                self._mix(places[first] // 2, pixels[first : first + 2], shares[first : first + 2])
        return {"pixel_values": pixels, "labels": shares}

    def _mix(self, pair: int, pixels: Tensor, shares: Tensor) -> None:
        """Mix two images, in place: each keeps the share `kept` of itself and gets the rest from the other."""
        random = generator(self.seed, pair, FOR_PAIRS)
        if random.random() >= self.augment.mix_probability:
            return
        cut = random.random() < 0.5 if self.augment.mixup and self.augment.cutmix else bool(self.augment.cutmix)
        alpha = self.augment.cutmix if cut else self.augment.mixup
        kept = float(random.beta(alpha, alpha))
        if cut:
            height, width = pixels.shape[-2:]
            top, bottom, left, right = _box(height, width, kept, random)
            kept = 1 - (bottom - top) * (right - left) / (height * width)
            pixels[:, :, top:bottom, left:right] = pixels[:, :, top:bottom, left:right].flip(0)
        else:
            pixels.copy_(pixels * kept + pixels.flip(0) * (1 - kept))
        shares.copy_(shares * kept + shares.flip(0) * (1 - kept))


def check_even_batch(batch: int) -> None:
    """Refuse batches that would part a pair."""
    if batch % 2:
        raise BadRequestError(
            f"a batch of {batch} was given; mixup and cutmix pair images, and the batch of a process must be even"
        )


def _box(height: int, width: int, kept: float, random: np.random.Generator) -> tuple[int, int, int, int]:
    """A rectangle of the share 1 - kept, anywhere with its middle in the image, cut at the edges."""
    side = math.sqrt(1 - kept)
    h, w = int(height * side), int(width * side)
    y, x = int(random.integers(height)), int(random.integers(width))
    return max(y - h // 2, 0), min(y - h // 2 + h, height), max(x - w // 2, 0), min(x - w // 2 + w, width)
