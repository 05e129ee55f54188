"""Small images for the tests of tokenformer.data: class folders, tables and IDX files, drawn with Pillow."""

import gzip
import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from tokenformer.data.images import ImageData, ImageSettings


def picture(number: int, width: int = 12, height: int = 10, mode: str = "RGB") -> Image.Image:
    """Noise that is different for each number."""
    noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **how) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def class_folder(folder: Path, names=("cat", "dog"), each: int = 4) -> Path:
    """A sub-folder for each class, with as many pictures in it."""
    for i, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for j in range(each):
            picture(i * each + j).save(folder / name / f"{j}.png")
    return folder


def table(labels, images=None, names=None, label="label", image="image"):
    """A dataset of the `datasets` library."""
    import datasets

    images = [encoded(picture(i)) for i in range(len(labels))] if images is None else images
    found = datasets.Dataset.from_dict({image: [{"bytes": data, "path": None} for data in images], label: labels})
    found = found.cast_column(image, datasets.Image())
    return found.cast_column(label, datasets.ClassLabel(names=names)) if names else found


def write_idx(path: Path, values: np.ndarray) -> None:
    data = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def idx_folder(folder: Path, rows: int = 6, ending: str = ".gz") -> Path:
    """As the package dataset-fashion-mnist has them, with fewer and smaller images."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", rows), ("t10k", 4)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 7, 7), dtype=np.uint8)
        write_idx(folder / f"{part}-images-idx3-ubyte{ending}", pixels)
        write_idx(folder / f"{part}-labels-idx1-ubyte{ending}", np.arange(count, dtype=np.uint8) % 3)
    return folder


def prepared(folder: Path, images, **settings) -> ImageData:
    """Prepare with a cache of the test's own, at a small size, holding nothing out unless asked."""
    images = [str(name) for name in images] if isinstance(images, list) else str(images)
    if settings.get("validation") is not None:
        settings["validation"] = str(settings["validation"])
    settings = {"size": 8, "validation_fraction": 0.0, "cache": str(folder / "cache"), **settings}
    return ImageData(ImageSettings(images=images, **settings)).prepare()
