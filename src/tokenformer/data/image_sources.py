"""Names of image sources to pictures with labels: class folders, Parquet, saved and Hub datasets, IDX files, `digits`.

Enters: an ImageConfig and a part, train or validation. Leaves: a Gallery, rows of encoded images in a fixed order that
any process can read, with a label each and the names of the classes. Nothing is decoded here.
"""

import glob
import hashlib
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BadFileError, BadRequestError, did_you_mean, install, one_line
from .config import as_list
from .image_config import ImageConfig
from .image_tables import Pixels, Source, Table
from .readers import Dataset, opened
from .sources import HUB_PREFIX, check_apart, files_in, is_saved_dataset, looks_like_hub

# Endings that Pillow reads and that people keep photographs in; others in a class folder are passed over.
ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2"}
SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test"}
IDX_IMAGES, IDX_LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
IDX_PARTS = {"train": "train-", "validation": "t10k-"}
UNSIGNED_BYTES = 8
MAX_CLASSES = 100_000


class Gallery:
    """The pictures of some sources, one after the other. `labels` are classes, `names` theirs in a fixed order."""

    def __init__(self, sources: list[Source], names: list[str], labels: np.ndarray) -> None:
        self.sources, self.names, self.labels = sources, names, labels
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return len(self.labels)

    def _place(self, row: int) -> tuple[Source, int]:
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


def find_images(config: ImageConfig, part: str = "train", training: Gallery | None = None) -> Gallery:
    """Everything that the sources of `part` stand for. With `training`, its classes are those that there must be."""
    given = as_list((config.images if part == "train" else config.validation) or [])
    if not given:
        raise BadRequestError(f"no images were given for {part}; name a folder, Parquet or IDX files, a Hub dataset")
    if part == "validation":
        trained = {place for name in as_list(config.images or []) for place in _places(name, config, "train")}
        for name in given:
            check_apart(name, _places(name, config, part), trained)
    sources = [source for name in given for source in _find(name, config, part)]
    if not any(len(source) for source in sources):
        raise BadRequestError(f"there are no images in {', '.join(given)}")
    _check_declared(sources, training)
    names = _class_names(sources, config) if training is None else training.names
    return Gallery(sources, names, np.concatenate([_labels(source, names, config, part) for source in sources]))


def _check_declared(sources: list[Source], training: Gallery | None) -> None:
    """All sources that declare names declare the same, whatever else `class_names` calls them."""
    trained = [] if training is None else training.sources
    declared = [source for source in (*trained, *sources) if source.declared is not None]
    for source in declared[1:]:
        if training is None or source.declared != training.names:
            _same_names(source, declared[0].declared or [])


def _class_names(sources: list[Source], config: ImageConfig) -> list[str]:
    """Declared names as they are declared; found ones sorted; for numbers the numbers."""
    declared = [source for source in sources if source.declared is not None]
    found = {name for source in sources if source.labels.dtype == object for name in source.labels.tolist()}
    if declared:
        names = list(declared[0].declared or [])
    elif found:
        names = sorted(found)
    else:
        names = [str(i) for i in range(max(_checked_numbers(source).max(initial=0) for source in sources) + 1)]
    if config.class_names is None:
        return names
    if found or len(config.class_names) < len(names):
        raise BadRequestError(
            f"class_names has {len(config.class_names)} names, and the images have "
            + (f"names already: {_some(names)}" if found else f"{len(names)} classes; give one for each, in order")
        )
    given = [str(name) for name in config.class_names]
    often, count = Counter(given).most_common(1)[0]
    if count > 1:
        raise BadRequestError(f"class_names has {often!r} more than once; each class needs a name of its own")
    return given


def _labels(source: Source, names: list[str], config: ImageConfig, part: str) -> np.ndarray:
    """The class of each row of a source, as a position in `names`."""
    if source.labels.dtype == object:
        position = {name: i for i, name in enumerate(names)}
        for name in dict.fromkeys(source.labels.tolist()):
            if name not in position:
                raise BadRequestError(
                    f"{source.name} has the class {name!r}, which training has not: {did_you_mean(name, names)}"
                )
        return np.array([position[name] for name in source.labels.tolist()], np.int64)
    if source.declared is not None and config.class_names is None:
        _same_names(source, names)
    labels = _checked_numbers(source)
    if source.declared is None and config.class_names is None and names != [str(i) for i in range(len(names))]:
        return _by_name(source, labels, names)
    if labels.max(initial=0) >= len(names):
        row = int(np.argmax(labels >= len(names)))
        whose = "there are" if part == "train" else "training has"
        raise BadRequestError(f"{source.where(row)} has the label {labels[row]}, and {whose} {len(names)} classes")
    return labels


def _by_name(source: Source, labels: np.ndarray, names: list[str]) -> np.ndarray:
    """Numbers where classes have names: a number is the class of that name, if there is one, and not a position."""
    position = {name: i for i, name in enumerate(names)}
    for row, number in zip(*np.unique(labels, return_index=True)[::-1], strict=True):
        if str(number) not in position:
            raise BadRequestError(
                f"{source.where(int(row))} has the label {number}, and the classes have names: {_some(names)}; set "
                "class_names, or give labels of one kind in all sources"
            )
    return np.array([position[str(number)] for number in labels.tolist()], np.int64)


def _same_names(source: Source, names: list[str]) -> None:
    if source.declared != names:
        raise BadRequestError(
            f"{source.name} has the classes {_some(source.declared or [])}, and training has {_some(names)}; names and "
            "order must be the same in all sources"
        )


def _checked_numbers(source: Source) -> np.ndarray:
    labels = source.labels
    for wrong, why in (
        (labels < 0, "a class is 0 or more; is this a part without labels?"),
        (labels >= MAX_CLASSES, f"more than {MAX_CLASSES:,} classes cannot be; set label_column"),
    ):
        if wrong.any():
            row = int(np.argmax(wrong))
            raise BadRequestError(f"{source.where(row)} has the label {labels[row]}; {why}")
    return labels


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", … ({len(names)} in all)" if len(names) > 5 else "")


def _find(name: str, config: ImageConfig, part: str) -> Iterator[Source]:
    path = Path(name).expanduser()
    split = config.hub_split if part == "train" else config.hub_validation_split
    if name == "digits":
        if path.exists():
            raise BadRequestError("digits are scikit-learn's, and there is a folder of that name; write ./digits")
        yield _digits()
    elif name.startswith(HUB_PREFIX):
        yield _dataset(name.removeprefix(HUB_PREFIX), config, split)
    elif path.is_dir() and is_saved_dataset(path):
        yield _dataset(str(path), config, split, saved=True)
    elif path.is_dir():
        yield _idx_folder(path, part) if _has_idx(path) else _class_folder(path)
    elif path.exists():
        yield _file(path, config)
    elif glob.has_magic(name):
        files = [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if Path(file).is_file()]
        if not files:
            raise BadRequestError(f"no file matches {name}")
        yield from (_file(file, config) for file in files)
    elif looks_like_hub(name):
        yield _dataset(name, config, split)
    else:
        raise BadRequestError(
            f"there is no file or folder {name}; a Hub dataset without an owner in its name is written {HUB_PREFIX}NAME"
        )


def _places(name: str, config: ImageConfig, part: str) -> set[str]:
    """What a name stands for: files, folders, parts of a dataset. The same for the same images of two parts."""
    path = Path(name).expanduser()
    if name == "digits":
        return {name}
    if path.is_dir() and _has_idx(path):
        paths = list(path.glob(f"{IDX_PARTS[part]}{IDX_IMAGES}*"))
    elif path.exists():
        paths = [path]
    else:
        paths = [Path(file) for file in glob.glob(str(path), recursive=True)]
    if paths and not (path / "dataset_dict.json").exists():
        return {str(found.resolve()) for found in paths}
    split = config.hub_split if part == "train" else config.hub_validation_split
    return {f"{path.resolve() if paths else name.removeprefix(HUB_PREFIX)} {config.hub_config} {split}"}


def _has_idx(folder: Path) -> bool:
    return any(folder.glob(f"*{IDX_IMAGES}*"))


def _file(path: Path, config: ImageConfig) -> Source:
    if path.suffix.lower() == ".parquet":
        return _parquet(path, config)
    if IDX_IMAGES in path.name:
        return _idx(path)
    raise BadRequestError(
        f"{path} is not a source of labelled images; give a folder with a sub-folder for each class, .parquet, or "
        f"…-{IDX_IMAGES}.gz"
    )


def _class_folder(folder: Path) -> Source:
    """A folder with a sub-folder for each class; what is below that belongs to it too."""
    loose = [file for file in sorted(folder.iterdir()) if file.is_file() and file.suffix.lower() in ENDINGS]
    if loose:
        raise BadRequestError(f"{loose[0]} is in no sub-folder, whose name would be its class; move it into one")
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
        raise BadRequestError(
            f"the sub-folders of {folder} are {', '.join(dict.fromkeys(classes))}, which are parts and not classes; "
            f"give images={folder / classes[0]} and validation={folder / classes[-1]} or the like"
        )
    empty = {inner.name for inner in folders} - set(classes)
    if empty:
        raise BadRequestError(
            f"the sub-folder {folder / min(empty)} has no images, so its class would be missing and others would move "
            "up; remove it, or put images in"
        )
    return Table.of_files(str(folder), [str(file) for file in files], classes)


def _parquet(path: Path, config: ImageConfig) -> Source:
    import datasets

    try:
        loaded = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=config.cache)
    except Exception as error:  # the library and those under it raise many kinds
        cause = error.__cause__ or error
        raise BadFileError(f"{path} {_fault(path)}: {one_line(cause)}") from error
    return Table.of_dataset(str(path), loaded, config)


def _fault(path: Path) -> str:
    """What is wrong with a Parquet file that was not loaded: it may as well be the disk, or the cache beside it."""
    import pyarrow.parquet as pq

    try:
        return "cannot be loaded" if pq.ParquetFile(path).metadata.num_rows else "has no rows"
    except Exception:
        return "is not a whole Parquet file"


def _dataset(name: str, config: ImageConfig, split: str, saved: bool = False) -> Source:
    loaded = Dataset(name, config.hub_config, split, saved).load(cache_dir=config.cache)
    return Table.of_dataset(name, loaded, config)


def _digits() -> Source:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise BadRequestError(f"digits comes with scikit-learn; {install('vision')}") from error
    data = load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8]
    return Pixels("digits", pixels, data.target.astype(np.int64), [str(name) for name in data.target_names])


def _idx_folder(folder: Path, part: str) -> Source:
    """The files of one part, by the names that MNIST gave them."""
    files = sorted(folder.glob(f"{IDX_PARTS[part]}{IDX_IMAGES}*"))
    if not files:
        there = ", ".join(sorted(file.name for file in folder.glob(f"*{IDX_IMAGES}*")))
        raise BadRequestError(f"{folder} has no {IDX_PARTS[part]}{IDX_IMAGES} for {part}; name one of {there}")
    return _idx(files[0])


def _idx(path: Path) -> Source:
    labels_path = path.with_name(path.name.replace(IDX_IMAGES, IDX_LABELS))
    if not labels_path.exists():
        raise BadRequestError(f"{path} has its labels in {labels_path.name}, which is not beside it")
    pixels, labels = read_idx(path, 3), read_idx(labels_path, 1)
    if len(pixels) != len(labels):
        raise BadFileError(f"{path} has {len(pixels):,} images, and {labels_path.name} {len(labels):,} labels")
    return Pixels(str(path), pixels, labels.astype(np.int64), None)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An IDX file of unsigned bytes, gzip-ed or not: two zeros, type, number of dimensions, their sizes, the data."""
    with opened(str(path)) as file:
        data = file.read()
    begin = 4 + 4 * dimensions
    if len(data) < begin or data[:4] != bytes((0, 0, UNSIGNED_BYTES, dimensions)):
        raise BadFileError(f"{path} is not an IDX file of bytes with {dimensions} dimensions; it begins {data[:4]!r}")
    shape = struct.unpack(f">{dimensions}I", data[4:begin])
    if len(data) - begin != int(np.prod(shape)):
        raise BadFileError(f"{path} says it holds {shape}, and has {len(data) - begin:,} bytes for them")
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)
