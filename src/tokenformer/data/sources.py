"""Names of sources, of text or of images: paths, folders, globs, names on the Hub, and what is built in.

Enters: what a recipe or a command names. Leaves: files in a fixed order, or a dataset that the `datasets` library
loads.
"""

import glob
import gzip
import os
import re
import zlib
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from ..errors import BadFileError, BadRequestError, install, one_line

HUB_PREFIX = "hub:"
BUILT_IN = {"stdlib", "digits"}  # sources of text and of images that need no files


def as_list(names: str | os.PathLike | Iterable[str] | None) -> list[str]:
    """One source, several or none, as a list."""
    if names is None:
        return []
    found = [str(names)] if isinstance(names, str | os.PathLike) else [str(name) for name in names]
    if not all(name.strip() for name in found):
        raise BadRequestError("a source has an empty name; for the folder you are in write .")
    return found


@dataclass(frozen=True)
class HubDataset:
    """What the `datasets` library loads: a name on the Hub, a dataset folder, or a folder it saved itself."""

    name: str
    config: str | None = None
    split: str = "train"
    saved: bool = False
    streaming: bool = False

    @property
    def place(self) -> str:
        """What is read: the same for the same rows, however the name is spelt."""
        if (Path(self.name) / "state.json").exists():
            return str(Path(self.name).resolve())
        return f"{Path(self.name).resolve() if self.saved else self.name} {self.config} {self.split}"

    def load(self, **more: Any) -> Any:
        """The dataset itself. `more` goes to load_dataset."""
        datasets = load_datasets()
        try:
            if not self.saved:
                return datasets.load_dataset(self.name, self.config, split=self.split, streaming=self.streaming, **more)
            loaded = datasets.load_from_disk(self.name)
        except Exception as error:  # the library and those under it raise many kinds, most for a wrong name
            asked = ", ".join(filter(None, (self.config and f"config {self.config!r}", f"split {self.split!r}")))
            where = "cannot be loaded" if Path(self.name).exists() else "is not a path here and cannot be loaded"
            raise BadRequestError(
                f"{self.name!r} {where} as a dataset ({asked}): {type(error).__name__}: {one_line(error)}"
            ) from error
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if self.split not in loaded:
            raise BadRequestError(
                f"{self.name!r} has no split {self.split!r}; it has {', '.join(loaded)}: choose one of them "
                "(hub_split, hub_validation_split, or --split)"
            )
        return loaded[self.split]


def load_datasets() -> Any:
    """The `datasets` library, which only some sources need."""
    try:
        import datasets
    except ImportError as error:
        raise BadRequestError(f"this source is read by the library datasets; {install('train')}") from error
    return datasets


def check_apart(name: str, places: set[str], trained: set[str]) -> None:
    """Refuse to validate on what is trained on. Places are paths, or other names of what is read."""
    if places & trained:
        raise BadRequestError(
            f"{name} is given for training and for validation; leave validation out, and validation_fraction holds out "
            "some of it"
        )


def kind_of_source(
    name: str, built_in: Container[str] = BUILT_IN
) -> Literal["built in", "hub", "saved dataset", "folder", "file", "pattern", "nothing"]:
    """What a name stands for: text and images have different names built in, and agree on all others."""
    path = Path(name).expanduser()
    if name in built_in:
        return "built in"
    if name.startswith(HUB_PREFIX):
        return "hub"
    if os.path.isdir(path):
        return "saved dataset" if is_saved_dataset(path) else "folder"
    if os.path.exists(path):
        return "file"
    if glob.has_magic(name):
        return "pattern"
    return "hub" if looks_like_hub(name) else "nothing"


def missing_sources(names: Iterable[str]) -> list[str]:
    """Those of the sources, of text or of images, that can only be files or folders and do not exist."""

    def is_missing(name: str) -> bool:
        kind = kind_of_source(name)
        return kind == "nothing" or (kind == "pattern" and not glob.glob(str(Path(name).expanduser()), recursive=True))

    return [name for name in names if is_missing(name)]


def is_saved_dataset(path: Path) -> bool:
    """A folder that `datasets` wrote with save_to_disk."""
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def looks_like_hub(name: str) -> bool:
    """`owner/name`, and not a path with a mistake in it: no such folder, and no ending."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)) and not (
        Path(name).parent.is_dir() or re.fullmatch(r"\.[A-Za-z]\w*", Path(name).suffix)
    )


def matching_files(pattern: str) -> list[Path]:
    """The files that a glob matches, sorted; an error if there are none."""
    found = glob.glob(str(Path(pattern).expanduser()), recursive=True)
    files = [Path(file) for file in sorted(found) if os.path.isfile(file)]
    if not files:
        raise BadRequestError(f"no file matches {pattern}")
    return files


def check_readable(path: Path) -> None:
    """Refuse a pipe or a device, which cannot be read twice and may never end."""
    if not path.is_file():
        raise BadRequestError(f"{path} is neither a file nor a folder; save its output to a file first")


def no_such_source(name: str) -> BadRequestError:
    """The error for a name that stands for nothing."""
    return BadRequestError(f"there is no file or folder {name}; a dataset on the Hub is written {HUB_PREFIX}NAME")


def files_in(folder: Path, left_out: Container[str] = ()) -> list[Path]:
    """All files below a folder, sorted, without hidden ones and without the folders that are `left_out`."""
    files = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        files += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if file.is_file())  # no pipes and sockets


@contextmanager
def opened(name: str) -> Iterator[BinaryIO]:
    """The file, unpacked if it is gzipped. Whatever is wrong with the disk or the archive becomes one line."""
    try:
        with gzip.open(name) if name.lower().endswith(".gz") else open(name, "rb") as file:
            yield cast(BinaryIO, file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadFileError(f"{name} is a damaged or incomplete gzip file: {one_line(error)}") from error
    except OSError as error:
        raise BadFileError(f"{name} cannot be read: {error.strerror or error}") from error
