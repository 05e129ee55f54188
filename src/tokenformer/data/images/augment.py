"""Augmentation of training images, every choice a pure function of (seed, sample); and batches, in which pairs are
mixed.

Enters: a decoded picture, the settings, and a generator made from the run's seed and the sample's place in the run's
order. Leaves: pixels [channels, size, size]. No global random state is read or moved, so that a sample has the same
pixels in any process, in any batch and after any resume; sums are of whole numbers, whose order does not matter, so
that the number of threads does not either. Most of RandAugment's colours are kornia's functions; kornia's own
RandAugment draws from torch's global state. Resizing is Pillow's, with antialiasing and before there are floats.

`ImageCollator` makes batches: pixel_values [batch, channels, size, size] and labels: classes [batch], or shares of them
[batch, classes] if images are mixed or labels smoothed. Samples 2k and 2k + 1 of the run are partners, and what is done
to them follows from (seed, k): it does not matter how the run is cut into batches, as long as these are even.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import BadRequestError, install
from .settings import AugmentSettings

# What a number is drawn for; the streams of one seed never meet.
FOR_IMAGES, FOR_PAIRS = 0, 1
STREAMS = 2
CROP_TRIES = 10
# At the largest magnitude: degrees, shear, share of the side, and how far a factor may be from 1.
MAX_ROTATION, MAX_SHEAR, MAX_SHIFT, MAX_CHANGE = 30.0, 0.3, 0.45, 0.9
MAX_POSTERIZED_BITS = 4
OPERATIONS = (
    "identity",
    "autocontrast",
    "equalize",
    "rotate",
    "solarize",
    "color",
    "posterize",
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)

Box = tuple[int, int, int, int]


def generator(seed: int, index: int, stream: int = FOR_IMAGES) -> np.random.Generator:
    """The random numbers for one image or pair. Philox counts from a key: no state has to be reached first."""
    key = np.array([seed % 2**64, STREAMS * index + stream], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def crop_box(width: int, height: int, augment: AugmentSettings, random: np.random.Generator) -> Box:
    """A random part of an image: left, top, right, bottom. The largest that fits in the middle if none is found."""
    assert augment.crop_scale is not None
    least, most = math.log(augment.crop_ratio[0]), math.log(augment.crop_ratio[1])
    for _ in range(CROP_TRIES):
        area = width * height * random.uniform(augment.crop_scale[0], augment.crop_scale[1])
        ratio = math.exp(random.uniform(least, most))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(random.integers(width - w + 1)), int(random.integers(height - h + 1))
            return left, top, left + w, top + h
    w = max(1, min(width, round(height * augment.crop_ratio[1])))
    h = max(1, min(height, round(width / augment.crop_ratio[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def shift_and_flip(pixels: Tensor, augment: AugmentSettings, random: np.random.Generator) -> Tensor:
    """A crop of the padded image, and its mirror image. Pixels [channels, height, width] of any type."""
    if augment.crop_padding:
        height, width = pixels.shape[-2:]
        top, left = random.integers(2 * augment.crop_padding + 1, size=2).tolist()
        padded = F.pad(pixels, [augment.crop_padding] * 4)
        pixels = padded[:, top : top + height, left : left + width]
    if augment.flip and random.random() < augment.flip:
        pixels = pixels.flip(-1)
    return pixels


def rand_augment(pixels: Tensor, augment: AugmentSettings, random: np.random.Generator) -> Tensor:
    """RandAugment: some operations, one after the other. Pixels [channels, height, width] in [0, 1]."""
    for _ in range(augment.rand_augment):
        name = OPERATIONS[int(random.integers(len(OPERATIONS)))]
        if augment.rand_probability < 1 and random.random() >= augment.rand_probability:
            continue
        magnitude = (
            random.normal(augment.magnitude, augment.magnitude_std) if augment.magnitude_std else augment.magnitude
        )
        sign = 1.0 if random.random() < 0.5 else -1.0
        pixels = operate(name, pixels, min(max(magnitude, 0.0), 10.0) / 10, sign)
    return pixels


def operate(name: str, pixels: Tensor, strength: float, sign: float = 1.0) -> Tensor:
    """One operation of RandAugment, with a strength from 0 to 1."""
    if name == "identity":
        return pixels
    if name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"):
        return _move(pixels, name, sign * strength)
    if name == "contrast":
        return _contrast(pixels, 1 + sign * MAX_CHANGE * strength)
    if name == "autocontrast":
        return _autocontrast(pixels)
    if name == "brightness":
        return (pixels * (1 + sign * MAX_CHANGE * strength)).clamp(0, 1)
    return _colours(name, pixels[None], strength, sign)[0].clamp(0, 1)


def _colours(name: str, image: Tensor, strength: float, sign: float) -> Tensor:
    """Those of kornia's functions that are exact and take their strength as an argument."""
    enhance = load_kornia().enhance
    if name == "equalize":
        return enhance.equalize(image)
    if name == "solarize":
        return enhance.solarize(image, (1 - strength) * 256 / 255)  # above 1 at strength 0, so that white stays
    if name == "posterize":
        return enhance.posterize(image, 8 - round(MAX_POSTERIZED_BITS * strength))
    factor = 1 + sign * MAX_CHANGE * strength
    if name == "sharpness":
        return enhance.sharpness(image, factor)
    assert name == "color", name
    return image if image.shape[1] == 1 else enhance.adjust_saturation_with_gray_subtraction(image, factor)


def load_kornia() -> Any:
    """Only RandAugment needs it."""
    try:
        import kornia
    except ImportError as error:
        raise BadRequestError(f"augment.rand_augment needs kornia; {install('vision')}") from error
    return kornia


def _autocontrast(pixels: Tensor) -> Tensor:
    """Each channel from 0 to 1. One that is all the same stays as it is; kornia's would become black."""
    low, high = pixels.amin((1, 2), keepdim=True), pixels.amax((1, 2), keepdim=True)
    return torch.where(high > low, (pixels - low) / (high - low).clamp_min(1e-6), pixels)


def _contrast(pixels: Tensor, factor: float) -> Tensor:
    """Away from or towards the mean grey. kornia's sums floats, and so depends on the number of threads."""
    grey = pixels[0]
    if len(pixels) == 3:
        grey = 0.299 * pixels[0] + 0.587 * pixels[1] + 0.114 * pixels[2]
    mean = (grey * 255).round().long().sum().item() / grey.numel() / 255
    return (mean + (pixels - mean) * factor).clamp(0, 1)


def _move(pixels: Tensor, name: str, amount: float) -> Tensor:
    """Rotated, sheared or shifted, bilinear, with grey coming in. Six times as fast as kornia at 32 pixels."""
    height, width = pixels.shape[-2:]
    matrix = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    if name == "rotate":
        angle = math.radians(MAX_ROTATION * amount)
        sine, cosine = math.sin(angle), math.cos(angle)
        # Coordinates go from -1 to 1 along both sides, whatever their lengths.
        matrix = [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]
    elif name == "shear_x":
        matrix[0][1] = MAX_SHEAR * amount * height / width
    elif name == "shear_y":
        matrix[1][0] = MAX_SHEAR * amount * width / height
    else:
        matrix[0 if name == "translate_x" else 1][2] = 2 * MAX_SHIFT * amount
    grid = F.affine_grid(torch.tensor([matrix]), [1, len(pixels), height, width], align_corners=False)
    # Outside of the image grid_sample finds 0, which is the middle here.
    return (F.grid_sample(pixels[None] - 0.5, grid, align_corners=False)[0] + 0.5).clamp(0, 1)


def erase(pixels: Tensor, augment: AugmentSettings, random: np.random.Generator) -> Tensor:
    """A rectangle of normal noise, which is what scaled pixels are like. Pixels [channels, height, width]."""
    if not augment.erasing or random.random() >= augment.erasing:
        return pixels
    channels, height, width = pixels.shape
    for _ in range(CROP_TRIES):
        area = height * width * random.uniform(augment.erasing_area[0], augment.erasing_area[1])
        ratio = math.exp(random.uniform(math.log(0.3), math.log(1 / 0.3)))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < h < height and 0 < w < width:
            top, left = int(random.integers(height - h + 1)), int(random.integers(width - w + 1))
            noise = torch.from_numpy(random.standard_normal((channels, h, w), np.float32))
            pixels = pixels.clone()
            pixels[:, top : top + h, left : left + w] = noise
            break
    return pixels


class ImageCollator:
    """The collate_fn of a data loader, for training and, where samples have no place in a run, for validation."""

    def __init__(self, num_labels: int, augment: AugmentSettings, seed: int) -> None:
        self.num_labels, self.augment, self.seed = num_labels, augment, seed

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
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
    """Refuse batches that would split a pair."""
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
