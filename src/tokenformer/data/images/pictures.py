"""Pictures: rows of a gallery as a torch dataset, decoded and augmented in whichever process asks for them.

Enters: a gallery, and the rows of one part of it. Leaves: {"pixel_values": [channels, size, size], "labels": class}.
A picture that cannot be decoded is named, counted once, and replaced by another of the part, drawn from the seed and
its place: the same one whoever finds it.
"""

import errno
import io
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...errors import BadFileError, BadRequestError, install, one_line
from .augment import crop_box, erase, generator, rand_augment, shift_and_flip
from .settings import ImageSettings
from .sources import Gallery

logger = logging.getLogger(__name__)

FOR_ANOTHER = 1  # what numbers are drawn for: beside the order of an epoch, which has the same seed
CANDIDATES = 64


class ImageReadError(BadFileError):
    """A picture could not be read, for a reason that may pass.

    When a worker process fails, torch makes the same error again with the worker's traceback for a message, whose last
    line has ours.
    """

    def __init__(self, message: str) -> None:
        last = str(message).strip().rpartition("\n")[2]
        super().__init__(last.removeprefix(f"{type(self).__module__}.{type(self).__name__}: "))


class BadImageError(ImageReadError):
    """A picture cannot be read, now or later."""


# Of a file that is not there, or not to be read. Pillow's own OSErrors have no number. All others may pass.
LASTING = (None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class Pictures(Dataset[dict[str, Any]]):
    """One part of the images. `data[i]` is as for validation; `data.augmented(i, sample)` is for training."""

    def __init__(self, gallery: Gallery, rows: np.ndarray, settings: ImageSettings) -> None:
        self.gallery, self.rows, self.settings = gallery, rows, settings
        mean, std = torch.tensor(settings.pixel_mean), torch.tensor(settings.pixel_std)
        self._mean, self._std = mean[:, None, None], std[:, None, None]  # [channels, 1, 1]
        # In memory that worker processes share: they find what is bad, and the training process counts it.
        self._bad = torch.zeros(len(rows), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> np.ndarray:
        """The class of each image, without decoding any."""
        return self.gallery.labels[self.rows]

    @property
    def bad_images(self) -> list[str]:
        """Where the pictures are that could not be decoded, of those that were asked for so far."""
        return [self.gallery.where(int(self.rows[i])) for i in self._bad.nonzero().flatten().tolist()]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Resized, and cropped in the middle."""
        index, picture = self._picture(index)
        pixels = _to_tensor(self._centre(picture))
        return {"pixel_values": self._scaled(pixels.float() / 255), "labels": self._label(index)}

    def augmented(self, index: int, sample: int) -> dict[str, Any]:
        """The image as sample number `sample` of a run sees it. `sample` is also for ImageCollator, which mixes."""
        augment, size = self.settings.augment, self.settings.size
        index, picture = self._picture(index)
        random = generator(self.settings.seed, sample)
        if augment.crop_scale is not None:
            width, height = picture.size
            picture = picture.crop(crop_box(width, height, augment, random)).resize((size, size), _bicubic())
        else:
            picture = self._centre(picture)
        pixels = shift_and_flip(_to_tensor(picture), augment, random).float() / 255
        pixels = self._scaled(rand_augment(pixels, augment, random))
        return {"pixel_values": erase(pixels, augment, random), "labels": self._label(index), "sample": sample}

    def _label(self, index: int) -> int:
        return int(self.gallery.labels[self.rows[index]])

    def _scaled(self, pixels: Tensor) -> Tensor:
        return (pixels - self._mean) / self._std

    def _centre(self, picture: Any) -> Any:
        """The shorter side to size / crop_fraction, and the middle of that."""
        size = self.settings.size
        short, (width, height) = self.settings.shorter_side, picture.size
        if min(width, height) != short:
            width, height = (short, short * height // width) if width < height else (short * width // height, short)
            picture = picture.resize((width, height), _bicubic())
        if (width, height) == (size, size):
            return picture
        left, top = (width - size) // 2, (height - size) // 2
        return picture.crop((left, top, left + size, top + size))

    def _picture(self, index: int) -> tuple[int, Any]:
        """The picture, or another where it cannot be decoded, and its index."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        for found in self._candidates(index % len(self)):
            if self._bad[found]:
                continue
            try:
                return found, open_picture(self.gallery, int(self.rows[found]), self.settings.channels)
            except BadImageError as error:
                if self.settings.strict:
                    raise BadImageError(f"{error}; set strict to false to go on without it, or fix it") from error
                self._bad[found] = True
                logger.warning("%s; another image takes its place", error)
        raise BadImageError(f"none of {len(self):,} images can be decoded, as {self.gallery.where(int(self.rows[0]))}")

    def _candidates(self, index: int) -> Iterator[int]:
        """The image, and those that may take its place, any of the part: where neighbours are bad, as in a copy that
        broke off, the next good one would have the place of them all. In the end each image is a candidate."""
        yield index
        random = np.random.default_rng((self.settings.seed % 2**64, index, FOR_ANOTHER))
        yield from random.integers(len(self), size=CANDIDATES).tolist()
        yield from range(len(self))


def open_picture(gallery: Gallery, row: int, channels: int) -> Any:
    """A picture of a gallery, decoded. An error names one that cannot be."""
    try:
        return decode(gallery.encoded(row), channels)
    except MemoryError:  # the machine's fault, not the image's
        raise
    except Exception as error:  # broken files make Pillow's decoders raise errors of many kinds
        if isinstance(error, OSError) and error.errno not in LASTING:
            raise ImageReadError(f"{gallery.where(row)} could not be read: {_reason(error)}; try again") from error
        raise BadImageError(f"{gallery.where(row)} cannot be decoded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    said = one_line(getattr(error, "strerror", None) or error)
    # What Pillow calls a file in memory is of no use to anybody.
    return "it is not an image of a known format" if said.startswith("cannot identify image file") else said


def decode(image: Any, channels: int) -> Any:
    """Stored bytes, a path or an array to a picture of 8 bits, upright, the first of an animation."""
    pillow = load_pillow()
    if image is None:
        raise ValueError("there is no image")
    if isinstance(image, np.ndarray):
        picture, sixteen = pillow.Image.fromarray(image), False
    else:
        with pillow.Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
            opened.load()
            picture, sixteen = _upright(opened), opened.format == "PPM"  # whose 16 bits Pillow keeps in 32
    if picture.mode in ("F", "I") and not sixteen:
        raise ValueError("it has 32 bits per pixel and no defined white level; save it with 8 or 16")
    if picture.mode.startswith("I"):  # 16 bits of grey, which a plain conversion would cut off at 255
        grey = np.asarray(picture).astype(np.int64) >> 8
        picture = pillow.Image.fromarray(grey.clip(0, 255).astype(np.uint8))
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    mode = "RGB" if channels == 3 else "L"
    return picture if picture.mode == mode else picture.convert(mode)


def _upright(picture: Any) -> Any:
    """Turned as its EXIF data says; as it is stored if that is broken, which is no reason to lose the picture."""
    try:
        return load_pillow().ImageOps.exif_transpose(picture)
    except Exception:  # Pillow raises errors of many kinds for broken EXIF
        return picture.copy()


def load_pillow() -> Any:
    """Pillow, which is not needed for text."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise BadRequestError(f"images need Pillow; {install('vision')}") from error
    return PIL


def _bicubic() -> Any:
    return load_pillow().Image.Resampling.BICUBIC


def _to_tensor(picture: Any) -> Tensor:
    """Bytes [channels, height, width]."""
    pixels = np.array(picture)  # [height, width] or [height, width, channels]
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None]).permute(2, 0, 1).contiguous()
