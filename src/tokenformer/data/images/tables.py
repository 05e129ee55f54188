"""Pictures in rows: a table of the `datasets` library (encoded, or paths of files), or an array of pixels.

Enters: a loaded dataset, or arrays. Leaves: a PictureSource: labels, the declared names of classes if there are any,
and for each row the stored image. Worker processes map a table's file themselves; nothing large is pickled.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BadRequestError, did_you_mean
from .settings import ImageSettings

# How the names of the types that a label may have begin.
LABEL_TYPES = ("int", "uint", "string", "large_string")


class PictureSource:
    """Rows of images. `labels` are numbers, or names if their type is object; `declared` has the names of numbers."""

    name: str
    labels: np.ndarray
    declared: list[str] | None

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, row: int) -> str:
        """How a message names the picture."""
        return f"{self.name} row {row + 1}"

    def encoded(self, row: int) -> Any:
        """The image as it is stored: bytes, the path of a file, or an array of pixels; None if there is none."""
        raise NotImplementedError

    def identity(self) -> bytes:
        """What stands for the images, without decoding them."""
        raise NotImplementedError


class PixelArray(PictureSource):
    """An array of images [rows, height, width], or with channels at the end."""

    def __init__(self, name: str, pixels: np.ndarray, labels: np.ndarray, declared: list[str] | None) -> None:
        self.name, self.pixels, self.labels, self.declared = name, pixels, labels, declared

    def encoded(self, row: int) -> np.ndarray:
        """The pixels of one image."""
        return self.pixels[row]

    def identity(self) -> bytes:
        """A hash of all pixels."""
        return hashlib.blake2b(np.ascontiguousarray(self.pixels).data, digest_size=16).digest()


class PictureTable(PictureSource):
    """A dataset whose column `image` has structures of bytes and path, of which one is there."""

    def __init__(
        self, name: str, dataset: Any, column: str, labels: np.ndarray, declared: list[str] | None, folder: str | None
    ) -> None:
        self.name, self.dataset, self.column = name, dataset, column
        self.labels, self.declared, self.folder = labels, declared, folder
        self._images = dataset.data.column(column)

    @classmethod
    def of_files(cls, folder: str, files: list[str], classes: list[str]) -> "PictureTable":
        """Files, by path, with the names of their classes."""
        import datasets

        features = datasets.Features({"image": datasets.Image(decode=False)})
        dataset = datasets.Dataset.from_dict({"image": files}, features=features)
        return cls(folder, dataset, "image", np.array(classes, object), None, folder)

    @classmethod
    def of_dataset(cls, name: str, dataset: Any, settings: ImageSettings) -> "PictureTable":
        """What `datasets` loaded. The columns are those of the configuration, or the only ones there can be."""
        import datasets

        column = _image_column(name, dataset, settings.image_column)
        label = _label_column(name, dataset, column, settings.label_column)
        dataset = dataset.select_columns([column, label]).cast_column(column, datasets.Image(decode=False))
        if dataset._indices is not None:  # a shuffled or filtered dataset: rows in the order that it says
            dataset = dataset.flatten_indices()
        labels, declared = _read_labels(name, dataset, label)
        return cls(name, dataset, column, labels, declared, None)

    def where(self, row: int) -> str:
        """The file, if each image is one; a row that names one has it in brackets."""
        image = self._images[row]  # of which the bytes are not copied
        if self.folder:
            return image["path"].as_py()
        named = image.is_valid and not image["bytes"].is_valid and image["path"].is_valid
        return super().where(row) + (f" ({image['path']})" if named else "")

    def encoded(self, row: int) -> bytes | str | None:
        """The bytes if they are in the table, else the path."""
        image = self._images[row].as_py()
        if image is None:
            return None
        return image["path"] if image["bytes"] is None else image["bytes"]

    def identity(self) -> bytes:
        """A hash of the sizes of all images, and of the paths of those that are files or outside the table.

        Not of the times at which files were written, which a copy of the folder need not have.
        """
        import pyarrow.compute as pc

        whole = hashlib.blake2b(digest_size=16)
        for chunk in self._images.chunks:
            if self.folder:
                for path in map(Path, chunk.field("path").to_pylist()):
                    whole.update(f"{path.relative_to(self.folder)} {path.stat().st_size}\n".encode())
            else:
                sizes = pc.fill_null(pc.binary_length(pc.struct_field(chunk, "bytes")), -1)
                whole.update(sizes.to_numpy(zero_copy_only=False).tobytes())
                outside = pc.filter(pc.struct_field(chunk, "path"), pc.less(sizes, 0))
                whole.update("\n".join(path or "" for path in outside.to_pylist()).encode())
        return whole.digest()

    def __getstate__(self) -> dict[str, Any]:
        """A dataset is pickled as the path of its file; its column would be pickled whole."""
        return {name: value for name, value in self.__dict__.items() if name != "_images"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._images = self.dataset.data.column(self.column)


def _image_column(name: str, dataset: Any, wanted: str | None) -> str:
    """The column of images: the one asked for, or the only one."""
    import datasets
    import pyarrow as pa

    def holds_images(feature: Any) -> bool:
        if isinstance(feature, dict):  # what datasets.Image looks like in a file that does not say so
            return "bytes" in feature
        kind = feature() if isinstance(feature, datasets.Value) else None
        return isinstance(feature, datasets.Image) or (
            kind is not None and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
        )

    found = [column for column, feature in dataset.features.items() if holds_images(feature)]
    column = _choose(name, dataset.column_names, found, wanted, "image")
    text = isinstance(dataset.features[column], datasets.Value) and dataset.features[column].dtype == "string"
    if column not in found and not text:  # text is taken for paths, if asked for
        raise BadRequestError(
            f"{name}: column {column!r} holds {_kind(dataset.features[column])}, not images"
            + (f"; {', '.join(found)} does" if found else "")
        )
    return column


def _label_column(name: str, dataset: Any, image: str, wanted: str | None) -> str:
    """The column of labels: the one asked for, the only one of classes, or the only one of numbers or names."""
    import datasets

    others = {column: feature for column, feature in dataset.features.items() if column != image}
    classes = [column for column, feature in others.items() if isinstance(feature, datasets.ClassLabel)]
    plain = [column for column, feature in others.items() if _kind(feature).startswith(LABEL_TYPES)]
    return _choose(
        name, [column for column in dataset.column_names if column != image], classes or plain, wanted, "label"
    )


def _choose(name: str, columns: list[str], found: list[str], wanted: str | None, what: str) -> str:
    there = ", ".join(columns) or "none"
    if wanted is not None:
        if wanted not in columns:
            hint = f"; {did_you_mean(wanted, columns)}" if columns else ""
            raise BadRequestError(f"{name} has no column {wanted!r}{hint} (columns: {there})")
        return wanted
    if len(found) != 1:
        could = f"{len(found)} columns that could be ({', '.join(found)})" if found else f"none (columns: {there})"
        raise BadRequestError(f"{name} needs one {what} column and has {could}; set {what}_column")
    return found[0]


def _kind(feature: Any) -> str:
    return str(getattr(feature, "dtype", None) or type(feature).__name__)


def _read_labels(name: str, dataset: Any, column: str) -> tuple[np.ndarray, list[str] | None]:
    """All labels, and the names that the dataset declares for them."""
    import datasets

    feature = dataset.features[column]
    kind, values = _kind(feature), dataset.data.column(column)
    if not kind.startswith(LABEL_TYPES):
        raise BadRequestError(
            f"{name}: column {column!r} holds {kind}; a label is a whole number or the name of a class"
        )
    if values.null_count:
        row = next(i for i, value in enumerate(values) if not value.is_valid)
        raise BadRequestError(f"{name} row {row + 1} has no label in column {column!r}")
    if "string" in kind:
        return np.array(values.to_pylist(), object), None
    labels = values.to_numpy().astype(np.int64)
    return labels, list(feature.names) if isinstance(feature, datasets.ClassLabel) else None
