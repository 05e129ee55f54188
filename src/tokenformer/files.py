"""Files and folders that appear whole or not at all.

Enters: the paths that a piece of work will leave. Leaves: all of them, complete, or none. What was there is
never overwritten.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import BadRequestError


def existing_file(path: str | os.PathLike) -> Path:
    """The path, if there is a file to read."""
    path = Path(path)
    if not path.is_file():
        raise BadRequestError(f"{path} {'is not a file' if path.exists() else 'does not exist'}; check the path")
    return path


def check_new_file(target: Path) -> None:
    """As `check_new`, for a file: it does not take the place of a folder, not even of an empty one."""
    if target.is_dir():
        raise BadRequestError(f"{target} is a folder; name a file, such as {target / 'scores.json'}")
    check_new(target)


def check_new(*targets: Path) -> None:
    """Refuse a target where something is already, other than an empty folder, or where nothing can be written."""
    for target in targets:
        if os.path.lexists(target):
            if not target.is_dir() or any(target.iterdir()):
                raise BadRequestError(f"{target} is there already and would be overwritten; give a new name")
            if target.is_mount() or target.resolve() == Path.cwd():
                raise BadRequestError(
                    f"{target} is the working directory or a mount point and cannot be replaced; name a new folder "
                    "in it"
                )
        parent = next(parent for parent in target.absolute().parents if os.path.lexists(parent))
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise BadRequestError(f"{target} cannot be written: {parent} is no folder to write to; give another place")


@contextmanager
def write_new(*targets: Path) -> Iterator[tuple[Path, ...]]:
    """Give a path beside each target, to write a file or folder to. At the end all take their names.

    If it fails or is interrupted, what was written vanishes.
    """
    check_new(*targets)
    targets = tuple(target.resolve() for target in targets)
    partials = tuple(target.with_name(f".{target.name}.partial-{os.getpid()}") for target in targets)
    renaming = False
    try:
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
        yield partials
        check_new(*targets)
        renaming = True
        for partial, target in zip(partials, targets, strict=True):
            partial.rename(target)
    except BaseException:
        for partial, target in zip(partials, targets, strict=True):
            if os.path.lexists(partial):
                _remove(partial)
            elif renaming:
                _remove(target)
        raise


def replace_file(path: Path, text: str) -> None:
    """Write a text file, or replace it, so that a reader finds the old one or the new one whole."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
