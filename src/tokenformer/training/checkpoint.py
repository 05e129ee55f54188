"""Checkpoints that appear whole or not at all, are verified when they are read, and of which a good one always stays.

A checkpoint is an ordinary model folder with the state of training beside the weights, and MANIFEST.json, which lists
every file with its size and hash and is written last. The folder gets its name by a rename at the very end: a process
that dies while writing leaves a hidden partial folder, which the next one removes.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import BadFileError

MANIFEST = "MANIFEST.json"
KEEP = "KEEP"  # a file by this name in a checkpoint says that it is never pruned


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.rpartition("-")[2])


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    found = [p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name) and p.is_dir()]
    return sorted(found, key=checkpoint_step)


@contextmanager
def new_checkpoint(target: Path) -> Iterator[Path]:
    """Give a partial folder to write a checkpoint into; verify nothing, seal it and give it its name at the end."""
    partial = partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        seal(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def partial_path(target: Path) -> Path:
    """Where a checkpoint is written before it has its name."""
    return target.with_name(f".{target.name}.partial")


def seal(partial: Path, target: Path) -> None:
    """Write the manifest, bring everything to disk, and rename. An older folder of that name is replaced."""
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    manifest = {str(p.relative_to(partial)): {"size": p.stat().st_size, "hash": _hash(p)} for p in files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*files, partial / MANIFEST, partial]:
        _sync(path)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    _sync(target.parent)


def verify(checkpoint: Path) -> None:
    """Raise a BadFileError that names the first file that is not as it was written."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        entries = [(name, entry["size"], entry["hash"]) for name, entry in manifest.items()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadFileError(f"{checkpoint / MANIFEST} is missing or broken") from error
    for name, size, digest in entries:
        path = checkpoint / name
        if not path.is_file():
            raise BadFileError(f"{path} is missing")
        if path.stat().st_size != size:
            raise BadFileError(f"{path} has {path.stat().st_size} bytes; {size} were written")
        if _hash(path) != digest:
            raise BadFileError(f"{path} is corrupted: its content is not what was written")


def last_good(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is as it was written, and what is wrong with the newer ones."""
    problems: list[str] = []
    for checkpoint in reversed(checkpoints(folder)):
        try:
            verify(checkpoint)
            return checkpoint, problems
        except BadFileError as error:
            problems.append(str(error))
    return None, problems


def mark_kept(partial: Path) -> None:
    """Have a checkpoint that is being written stay for good: the one from just before the decay."""
    (partial / KEEP).write_text("The learning rate has not decayed yet: a ladder can be climbed on from here.\n")


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and those marked KEEP. For when the newest was just sealed."""
    for checkpoint in checkpoints(folder)[: -max(1, keep)]:
        if not (checkpoint / KEEP).exists():
            shutil.rmtree(checkpoint, ignore_errors=True)


def remove_partials(folder: Path) -> None:
    """Remove what a process that died left half-written."""
    for path in folder.glob(".*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
