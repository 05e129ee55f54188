"""Prepared data on disk: made once, found again, never half there.

Enters: a key and the work that fills a folder. Leaves: the folder `<cache>/data/<key>`, with a manifest of sizes and
checksums that were found to hold. The work is done in a folder beside it, under a lock, and takes its name at the end:
a second process waits and finds it done; a killed one leaves nothing that could be taken for good.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from ..errors import BadRequestError
from .blocks import checksum

MANIFEST = "manifest.json"


class Entry(NamedTuple):
    """A folder of prepared data, and whether it was there already."""

    folder: Path
    manifest: dict[str, Any]
    found: bool


def find_or_make(cache: Path, key: str, make: Callable[[Path], dict[str, Any]]) -> Entry:
    """The entry of that key. `make` fills an empty folder and gives its manifest, with size and crc32 of each file."""
    home = cache / "data"
    folder, partial = home / key, home / f".{key}.partial"
    manifest = read_manifest(folder)  # first without the lock: a cache that is there may be read-only
    if manifest is not None:
        return Entry(folder, manifest, True)
    lock = home / f".{key}.lock"
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise BadRequestError(f"the cache {cache} cannot be written: {error.strerror}; name another folder") from error
    with FileLock(lock):
        manifest = read_manifest(folder)
        if manifest is not None:
            return Entry(folder, manifest, True)
        try:
            # Under the lock, what is there is broken or was left by a process that is gone.
            for left in (folder, partial):
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir()
            manifest = make(partial)
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return Entry(folder, manifest, False)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, if everything is there as it says; None if not."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, file in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != file["size"] or checksum(path) != file["crc32"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest
