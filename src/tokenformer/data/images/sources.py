"""Names of image sources to pictures with labels: class folders, Parquet, saved and Hub datasets, IDX files, `digits`.

Enters: an ImageSettings and a part, train or validation. Leaves: a Gallery, rows of encoded images in a fixed order
that any process can read, with a label each and the names of the classes. Nothing is decoded here.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BadFileError, BadRequestError, did_you_mean, install, one_line
from ..sources import (
    HUB_PREFIX,
    HubDataset,
    as_list,
    check_apart,
    check_readable,
    files_in,
    kind_of_source,
    load_datasets,
    matching_files,
    no_such_source,
    opened,
)
from .settings import ImageSettings
from .tables import PictureSource, PictureTable, PixelArray

# Endings that Pillow reads and that people keep photographs in; others in a class folder are passed over.
ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2"}
SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test"}
IDX_IMAGES, IDX_LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
IDX_PARTS = {"train": "train-", "validation": "t10k-"}
UNSIGNED_BYTES = 8
MAX_CLASSES = 100_000


class Gallery:
    """The pictures of some sources, one after the other. `labels` are classes, `names` theirs in a fixed order."""

    def __init__(self, sources: list[PictureSource], names: list[str], labels: np.ndarray) -> None:
        self.sources, self.names, self.labels = sources, names, labels
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return len(self.labels)

    def _place(self, row: int) -> tuple[PictureSource, int]:
        index = int(np.searchsorted(self._ends, row, side="right"))
        return self.sources[index], row - (int(self._ends[index - 1]) if index else 0)

    def encoded(self, row: int) -> Any:
        """The image as it is stored: bytes, the path of a file, or an array of pixels."""
        source, inner = self._place(row)
        return source.encoded(inner)

    def where(self, row: int) -> str:
        """How a message names the picture."""
        source, inner = self._place(row)
        return source.where(inner)

    @property
    def numbered(self) -> bool:
        """Whether the classes have numbers only, of which `names` was made."""
        return all(source.declared is None and source.labels.dtype != object for source in self.sources)

    @property
    def fingerprint(self) -> str:
        """Stands for classes, labels, and the names or sizes of all images; not for every byte of them."""
        whole = hashlib.blake2b(repr(self.names).encode(), digest_size=16)
        whole.update(self.labels.tobytes())
        for source in self.sources:
            whole.update(source.identity())
        return whole.hexdigest()

    def digests(self) -> np.ndarray:
        """64 bits of a hash of each image's stored content. Reads them all."""
        return np.array([_digest(self.encoded(row), self.where(row)) for row in range(len(self))], np.uint64)


def _digest(image: Any, where: str) -> int:
    try:
        data = Path(image).read_bytes() if isinstance(image, str) else image
    except OSError:
        data = None  # what cannot be read is dealt with when it is decoded
    content = where.encode() if data is None else bytes(data)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def find_images(settings: ImageSettings, part: str = "train", training: Gallery | None = None) -> Gallery:
    """Everything that the sources of `part` stand for. With `training`, its classes are the ones expected."""
    given = as_list(settings.images if part == "train" else settings.validation)
    if not given:
        raise BadRequestError(f"no images were given for {part}; name a folder, Parquet or IDX files, a Hub dataset")
    if part == "validation":
        trained = {place for name in as_list(settings.images) for place in _places(name, settings, "train")}
        for name in given:
            check_apart(name, _places(name, settings, part), trained)
    sources = [source for name in given for source in _find(name, settings, part)]
    if not any(len(source) for source in sources):
        raise BadRequestError(f"there are no images in {', '.join(given)}")
    _check_declared(sources, training)
    names = _class_names(sources, settings) if training is None else training.names
    return Gallery(sources, names, np.concatenate([_labels(source, names, settings, part) for source in sources]))


def _check_declared(sources: list[PictureSource], training: Gallery | None) -> None:
    """Refuse sources that declare different names, whatever `class_names` calls them."""
    trained = [] if training is None else training.sources
    declared = [source for source in (*trained, *sources) if source.declared is not None]
    for source in declared[1:]:
        if training is None or source.declared != training.names:
            _same_names(source, declared[0].declared or [])


def _class_names(sources: list[PictureSource], settings: ImageSettings) -> list[str]:
    """Declared names as they are declared; found ones sorted; for numbers the numbers."""
    declared = [source for source in sources if source.declared is not None]
    found = {name for source in sources if source.labels.dtype == object for name in source.labels.tolist()}
    if declared:
        names = list(declared[0].declared or [])
    elif found:
        names = sorted(found)
    else:
        names = [str(i) for i in range(max(_checked_numbers(source).max(initial=0) for source in sources) + 1)]
    if settings.class_names is None:
        return names
    if found or len(settings.class_names) < len(names):
        raise BadRequestError(
            f"class_names has {len(settings.class_names)} names, and the images have "
            + (f"names already: {_some(names)}" if found else f"{len(names)} classes; give one for each, in order")
        )
    given = [str(name) for name in settings.class_names]
    often, count = Counter(given).most_common(1)[0]
    if count > 1:
        raise BadRequestError(f"class_names has {often!r} more than once; each class needs a name of its own")
    return given


def _labels(source: PictureSource, names: list[str], settings: ImageSettings, part: str) -> np.ndarray:
    """The class of each row of a source, as a position in `names`."""
    if source.labels.dtype == object:
        position = {name: i for i, name in enumerate(names)}
        for name in dict.fromkeys(source.labels.tolist()):
            if name not in position:
                raise BadRequestError(
                    f"{source.name} has the class {name!r}, which training does not have: {did_you_mean(name, names)}"
                )
        return np.array([position[name] for name in source.labels.tolist()], np.int64)
    if source.declared is not None and settings.class_names is None:
        _same_names(source, names)
    labels = _checked_numbers(source)
    if source.declared is None and settings.class_names is None and names != [str(i) for i in range(len(names))]:
        return _by_name(source, labels, names)
    if labels.max(initial=0) >= len(names):
        row = int(np.argmax(labels >= len(names)))
        whose = "there are" if part == "train" else "training has"
        raise BadRequestError(f"{source.where(row)} has the label {labels[row]}, and {whose} {len(names)} classes")
    return labels


def _by_name(source: PictureSource, labels: np.ndarray, names: list[str]) -> np.ndarray:
    """Numbers where classes have names: a number is the class of that name, if there is one, and not a position."""
    position = {name: i for i, name in enumerate(names)}
    for row, number in zip(*np.unique(labels, return_index=True)[::-1], strict=True):
        if str(number) not in position:
            raise BadRequestError(
                f"{source.where(int(row))} has the label {number}, and the classes have names: {_some(names)}; set "
                "class_names, or use labels of one kind in all sources"
            )
    return np.array([position[str(number)] for number in labels.tolist()], np.int64)


def _same_names(source: PictureSource, names: list[str]) -> None:
    if source.declared != names:
        raise BadRequestError(
            f"{source.name} has the classes {_some(source.declared or [])}, and training has {_some(names)}; names and "
            "order must be the same in all sources"
        )


def _checked_numbers(source: PictureSource) -> np.ndarray:
    labels = source.labels
    for wrong, why in (
        (labels < 0, "labels start at 0; is this split unlabelled?"),
        (labels >= MAX_CLASSES, f"more than {MAX_CLASSES:,} classes are not supported; set label_column"),
    ):
        if wrong.any():
            row = int(np.argmax(wrong))
            raise BadRequestError(f"{source.where(row)} has the label {labels[row]}; {why}")
    return labels


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", … ({len(names)} in all)" if len(names) > 5 else "")


def _find(name: str, settings: ImageSettings, part: str) -> Iterator[PictureSource]:
    path, kind = Path(name).expanduser(), kind_of_source(name, {"digits"})
    split = settings.hub_split if part == "train" else settings.hub_validation_split
    if kind == "built in":
        if path.exists():
            raise BadRequestError("digits are scikit-learn's, and there is a folder of that name; write ./digits")
        yield _digits()
    elif kind == "hub":
        yield _dataset(name.removeprefix(HUB_PREFIX), settings, split)
    elif kind == "saved dataset":
        yield _dataset(str(path), settings, split, saved=True)
    elif kind == "folder":
        yield _idx_folder(path, part) if _has_idx(path) else _class_folder(path)
    elif kind == "file":
        check_readable(path)
        yield _file(path, settings)
    elif kind == "pattern":
        yield from (_file(file, settings) for file in matching_files(name))
    else:
        raise no_such_source(name)


def _places(name: str, settings: ImageSettings, part: str) -> set[str]:
    """What a name stands for: files, folders, parts of a dataset. The same for the same images of two parts."""
    path, kind = Path(name).expanduser(), kind_of_source(name, {"digits"})
    split = settings.hub_split if part == "train" else settings.hub_validation_split
    if kind in ("built in", "nothing"):
        return {name}
    if kind == "hub":
        return {f"{name.removeprefix(HUB_PREFIX)} {settings.hub_config} {split}"}
    if (path / "dataset_dict.json").exists():
        return {f"{path.resolve()} {settings.hub_config} {split}"}
    if kind == "pattern":
        return {str(file.resolve()) for file in matching_files(name)}
    if kind == "folder" and _has_idx(path):
        return {str(file.resolve()) for file in path.glob(f"{IDX_PARTS[part]}{IDX_IMAGES}*")}
    return {str(path.resolve())}


def _has_idx(folder: Path) -> bool:
    return any(folder.glob(f"*{IDX_IMAGES}*"))


def _file(path: Path, settings: ImageSettings) -> PictureSource:
    if path.suffix.lower() == ".parquet":
        return _parquet(path, settings)
    if IDX_IMAGES in path.name:
        return _idx(path)
    raise BadRequestError(
        f"{path} is not a source of labelled images; use a folder with a sub-folder for each class, .parquet, or "
        f"…-{IDX_IMAGES}.gz"
    )


def _class_folder(folder: Path) -> PictureSource:
    """A folder with a sub-folder for each class; what is below that belongs to it too."""
    loose = [file for file in sorted(folder.iterdir()) if file.is_file() and file.suffix.lower() in ENDINGS]
    if loose:
        raise BadRequestError(f"{loose[0]} is not in a class folder; move it into one")
    # One by one: the folder of a class may be a link, which a walk from above would not follow.
    folders = sorted(inner for inner in folder.iterdir() if inner.is_dir() and not inner.name.startswith("."))
    files = [file for inner in folders for file in files_in(inner) if file.suffix.lower() in ENDINGS]
    classes = [file.relative_to(folder).parts[0] for file in files]
    if not files:
        tables = sorted(folder.glob("*.parquet"))
        hint = (
            f"; for its Parquet files write {folder}/*.parquet" if tables else f" (looked for {_some(sorted(ENDINGS))})"
        )
        raise BadRequestError(f"there are no images in the folder {folder}{hint}")
    if {name.lower() for name in classes} <= SPLIT_NAMES:
        parts = list(dict.fromkeys(classes))
        trained = next((part for part in parts if part.lower().startswith("train")), parts[0])
        held_out = next((part for part in parts if part.lower().startswith("val")), None)
        held_out = held_out or next((part for part in parts if part != trained), None)
        raise BadRequestError(
            f"the sub-folders of {folder} are {', '.join(parts)}, which are parts and not classes; set "
            f"images={folder / trained}" + (f" and validation={folder / held_out}" if held_out else "")
        )
    empty = {inner.name for inner in folders} - set(classes)
    if empty:
        raise BadRequestError(
            f"the sub-folder {folder / min(empty)} has no images, so its class would be missing and others would move "
            "up; remove it, or put images in"
        )
    return PictureTable.of_files(str(folder), [str(file) for file in files], classes)


def _parquet(path: Path, settings: ImageSettings) -> PictureSource:
    try:
        loaded = load_datasets().load_dataset("parquet", data_files=str(path), split="train", cache_dir=settings.cache)
    except Exception as error:  # the library and those under it raise many kinds
        cause = error.__cause__ or error
        raise BadFileError(f"{path} {_fault(path)}: {one_line(cause)}") from error
    return PictureTable.of_dataset(str(path), loaded, settings)


def _fault(path: Path) -> str:
    """What is wrong with a Parquet file that was not loaded: it may be the disk's fault, or the cache's."""
    import pyarrow.parquet as pq

    try:
        return "cannot be loaded" if pq.ParquetFile(path).metadata.num_rows else "has no rows"
    except Exception:
        return "is a damaged or incomplete Parquet file"


def _dataset(name: str, settings: ImageSettings, split: str, saved: bool = False) -> PictureSource:
    loaded = HubDataset(name, settings.hub_config, split, saved).load(cache_dir=settings.cache)
    return PictureTable.of_dataset(name, loaded, settings)


def _digits() -> PictureSource:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise BadRequestError(f"digits comes with scikit-learn; {install('vision')}") from error
    data = load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8]
    return PixelArray("digits", pixels, data.target.astype(np.int64), [str(name) for name in data.target_names])


def _idx_folder(folder: Path, part: str) -> PictureSource:
    """The files of one part, by the names that MNIST gave them."""
    files = sorted(folder.glob(f"{IDX_PARTS[part]}{IDX_IMAGES}*"))
    if not files:
        there = ", ".join(sorted(file.name for file in folder.glob(f"*{IDX_IMAGES}*")))
        raise BadRequestError(f"{folder} has no {IDX_PARTS[part]}{IDX_IMAGES} for {part}; name one of {there}")
    return _idx(files[0])


def _idx(path: Path) -> PictureSource:
    labels_path = path.with_name(path.name.replace(IDX_IMAGES, IDX_LABELS))
    if not labels_path.exists():
        raise BadRequestError(f"{path} has its labels in {labels_path.name}, which is not beside it")
    pixels, labels = read_idx(path, 3), read_idx(labels_path, 1)
    if len(pixels) != len(labels):
        raise BadFileError(f"{path} has {len(pixels):,} images, and {labels_path.name} {len(labels):,} labels")
    return PixelArray(str(path), pixels, labels.astype(np.int64), None)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An IDX file of unsigned bytes, gzipped or not: two zeros, type, number of dimensions, their sizes, the data."""
    with opened(str(path)) as file:
        data = file.read()
    begin = 4 + 4 * dimensions
    if len(data) < begin or data[:4] != bytes((0, 0, UNSIGNED_BYTES, dimensions)):
        raise BadFileError(f"{path} is not an IDX file of bytes with {dimensions} dimensions; it begins {data[:4]!r}")
    shape = struct.unpack(f">{dimensions}I", data[4:begin])
    if len(data) - begin != int(np.prod(shape)):
        raise BadFileError(f"{path} says it holds {shape}, and has {len(data) - begin:,} bytes for them")
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)
