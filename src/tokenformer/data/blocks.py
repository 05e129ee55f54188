"""Streams of ids to files of blocks, and those files as torch datasets.

Enters: ids, in runs of any length. Leaves: a file with whole blocks one after the other, and `Blocks`, which maps it
into memory. A tail shorter than a block is dropped and counted.
"""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class BlockWriter:
    """Writes one part of the corpus."""

    def __init__(self, path: Path, block_length: int, dtype: type[np.unsignedinteger]):
        self.block_length = block_length
        self.counts = {"documents": 0, "bytes": 0, "tokens": 0}
        self.crc32 = 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed by `close`, which the caller owes)
        self._carry = np.zeros(0, dtype)

    def add(self, ids: np.ndarray, size: int, documents: int) -> None:
        """Write the blocks that are full, keep the rest. The ids are of `size` bytes, where `documents` begin."""
        for name, count in (("documents", documents), ("bytes", size), ("tokens", len(ids))):
            self.counts[name] += count
        ids = np.concatenate((self._carry, ids))
        whole = len(ids) - len(ids) % self.block_length
        data = ids[:whole].data
        self._file.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self._carry = ids[whole:].copy()

    def close(self) -> dict[str, int]:
        """The counts of this part."""
        self._file.close()
        return {**self.counts, "blocks": self.counts["tokens"] // self.block_length, "dropped": len(self._carry)}


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    value = 0
    with open(path, "rb") as file:
        while data := file.read(1 << 22):
            value = zlib.crc32(data, value)
    return value


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
