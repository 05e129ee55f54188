"""Token ids to blocks on disk: packed once, found again by a key of their content, never half there.

Enters: ids, in runs of any length, and a key. Leaves: the folder `<cache>/data/<key>` with a file of whole blocks for
each part, every file as it was written, and `Blocks`, which maps such a file into memory. A tail shorter than a block
is dropped and counted. The work is done under a lock: a second process waits and finds it done; a killed one leaves
nothing that could be mistaken for the real thing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...errors import BadFileError, BadRequestError
from ...io import check_folder, lock, new_folder, read_json

FACTS = "data.json"


class BlockWriter:
    """Writes one part of the corpus."""

    def __init__(self, path: Path, block_length: int, dtype: type[np.unsignedinteger]):
        self.block_length = block_length
        self.counts = {"documents": 0, "bytes": 0, "tokens": 0}
        self._file = open(path, "wb")  # noqa: SIM115 (closed by `close`, which the caller owes)
        self._carry = np.zeros(0, dtype)

    def add(self, ids: np.ndarray, size: int, documents: int) -> None:
        """Write the blocks that are full, keep the rest. The ids are of `size` bytes, where `documents` begin."""
        for name, count in (("documents", documents), ("bytes", size), ("tokens", len(ids))):
            self.counts[name] += count
        ids = np.concatenate((self._carry, ids))
        whole = len(ids) - len(ids) % self.block_length
        self._file.write(ids[:whole].data)
        self._carry = ids[whole:].copy()

    def close(self) -> dict[str, int]:
        """The counts of this part."""
        self._file.close()
        return {**self.counts, "blocks": self.counts["tokens"] // self.block_length, "dropped": len(self._carry)}


class Blocks(Dataset[dict[str, Tensor]]):
    """Blocks of a prepared file, mapped into memory; labels are the inputs, as causal language models want them."""

    def __init__(self, path: Path, block_length: int, dtype: str):
        self.path, self.block_length, self.dtype = path, block_length, dtype
        self._map()

    def _map(self) -> None:
        self._tokens = np.memmap(self.path, self.dtype, "r").reshape(-1, self.block_length)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self._tokens[index].astype(np.int64))  # [block_length]
        return {"input_ids": ids, "labels": ids}

    def __getstate__(self) -> dict[str, Any]:
        """A worker process maps the file itself; pickled, a map would be copied whole."""
        return {name: value for name, value in self.__dict__.items() if name != "_tokens"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


class Entry(NamedTuple):
    """A folder of prepared data, its facts, and whether it existed already."""

    folder: Path
    facts: dict[str, Any]
    found: bool


def find_or_make(cache: Path, key: str, make: Callable[[Path], dict[str, Any]]) -> Entry:
    """The entry of that key. `make` fills an empty folder and returns its facts."""
    home = cache / "data"
    folder = home / key
    facts = _read(folder)  # first without the lock: a cache that is complete may be read-only
    if facts is not None:
        return Entry(folder, facts, True)
    place = home / f".{key}.lock"
    try:
        home.mkdir(parents=True, exist_ok=True)
        place.touch()
    except OSError as error:
        raise BadRequestError(f"the cache {cache} cannot be written: {error.strerror}; name another folder") from error
    with lock(place, wait=True):
        facts = _read(folder)
        if facts is not None:
            return Entry(folder, facts, True)
        with new_folder(folder) as partial:
            facts = make(partial)
            (partial / FACTS).write_text(json.dumps(facts, indent=1))
    return Entry(folder, facts, False)


def _read(folder: Path) -> dict[str, Any] | None:
    """The facts of an entry; None if it is missing or broken."""
    try:
        check_folder(folder)
        return read_json(folder / FACTS)
    except (BadFileError, OSError):
        return None
