"""Names of sources to the files and datasets they stand for.

Enters: paths, folders, globs, `stdlib`, Hub names. Leaves: a list of readers, in a fixed order.
"""

import glob
import os
import re
import sysconfig
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from ..errors import BadRequestError
from .config import DataConfig, as_list
from .readers import CommaSeparated, Dataset, JsonLines, Parquet, RowSource, TextFile

Source = TextFile | RowSource

READERS = {".jsonl": JsonLines, ".ndjson": JsonLines, ".json": JsonLines, ".csv": CommaSeparated, ".parquet": Parquet}
# Of the standard library: tests and data for them, and what is not Python's own.
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
HUB_PREFIX = "hub:"
BUILT_IN = {"stdlib", "digits"}  # sources of text and of images that need no files


def find_sources(config: DataConfig, part: str = "train") -> list[Source]:
    """Everything that the sources of `part`, train or validation, stand for."""
    named = config.train if part == "train" else config.validation
    names = as_list(named or [])
    if not names:
        raise BadRequestError(f"no source was given for {part}; name files, folders, a Hub dataset, or stdlib")
    split = config.hub_split if part == "train" else config.hub_validation_split
    found = [source for name in names for source in _find(name, config, split)]
    if part == "validation":
        trained = {_place(source) for source in find_sources(config)}
        for source in found:
            check_apart(source.name, {_place(source)}, trained)
    return found


def check_apart(name: str, places: set[str], trained: set[str]) -> None:
    """Refuse to validate on what is trained on. Places are paths, or other names of what is read."""
    if places & trained:
        raise BadRequestError(
            f"{name} is given for training and for validation; leave validation out, and validation_fraction holds out "
            "some of it"
        )


def _place(source: Source) -> str:
    """What it reads: the same for the same text, however its name is spelt."""
    if not isinstance(source, Dataset) or (Path(source.name) / "state.json").exists():
        return str(Path(source.name).resolve())
    name = Path(source.name).resolve() if source.saved else source.name
    return f"{name} {source.config} {source.split}"


def _find(name: str, config: DataConfig, split: str) -> Iterator[Source]:
    path = Path(name).expanduser()
    if name == "stdlib":
        yield from _library()
    elif name.startswith(HUB_PREFIX):
        yield _dataset(name.removeprefix(HUB_PREFIX), config, split)
    elif is_saved_dataset(path):
        yield _dataset(str(path), config, split, saved=True)
    elif path.is_dir():
        files = files_in(path)
        if not files:
            raise BadRequestError(f"the folder {name} has no files in it")
        yield from (_reader(file, found=True) for file in files)
    elif path.exists():
        yield _reader(path)
    elif glob.has_magic(name):
        files = [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(file)]
        if not files:
            raise BadRequestError(f"no file matches {name}")
        yield from (_reader(file, found=True) for file in files)
    elif looks_like_hub(name):
        yield _dataset(name, config, split)
    else:
        raise BadRequestError(
            f"there is no file or folder {name}; a Hub dataset without an owner in its name is written {HUB_PREFIX}NAME"
        )


def not_there(names: Iterable[str]) -> list[str]:
    """Those of the sources, of text or of images, that can only be files or folders and are not there."""

    def is_there(name: str) -> bool:
        path = str(Path(name).expanduser())
        found = os.path.exists(path) or (glob.has_magic(name) and any(glob.iglob(path, recursive=True)))
        return found or name in BUILT_IN or name.startswith(HUB_PREFIX) or looks_like_hub(name)

    return [name for name in names if not is_there(name)]


def is_saved_dataset(path: Path) -> bool:
    """A folder that `datasets` wrote with save_to_disk."""
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def looks_like_hub(name: str) -> bool:
    """`owner/name`, and not a path with a mistake in it: no such folder, and no ending."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)) and not (
        Path(name).parent.is_dir() or re.fullmatch(r"\.[A-Za-z]\w*", Path(name).suffix)
    )


def _dataset(name: str, config: DataConfig, split: str, saved: bool = False) -> Source:
    return Dataset(name, config.hub_config, split, saved, config.streaming)


def _reader(path: Path, found: bool = False) -> Source:
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    reader = READERS.get(plain.suffix.lower())
    return reader(str(path)) if reader else TextFile(str(path), found)


def files_in(folder: Path, left_out: Container[str] = ()) -> list[Path]:
    """All files below a folder, sorted, without hidden ones and without the folders that are `left_out`."""
    files = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        files += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if file.is_file())  # no pipes and sockets


def _library() -> Iterator[Source]:
    """The source of the running Python's standard library, which every machine that can run us has."""
    folder = sysconfig.get_path("stdlib")
    files = [file for file in files_in(Path(folder), NOT_LIBRARY) if file.suffix == ".py"]
    if not files:
        raise BadRequestError(f"this Python has no source of its standard library in {folder}; name another source")
    yield from (TextFile(str(file), found=True) for file in files)
