"""The texts, as bytes, each split 90/5/5 in order.

Enters: the name of a text (texts.py). Leaves: blocks of bytes; which block is sample i of a run is decided by its seed
alone.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .texts import bytes_of

SPLIT = {"train": (0.0, 0.9), "validation": (0.9, 0.95), "test": (0.95, 1.0)}


@cache
def read(text: str) -> Tensor:
    """All bytes of a text."""
    return torch.from_numpy(np.frombuffer(bytes_of(text), dtype=np.uint8).copy())


def split(text: str, part: str) -> Tensor:
    """One part of a text."""
    data = read(text)
    begin, end = (round(place * len(data)) for place in SPLIT[part])
    return data[begin:end]


class TrainingBlocks:
    """Blocks of the training part in the random order of a seed; after the last one a new order follows."""

    def __init__(self, text: str, length: int, seed: int) -> None:
        part = split(text, "train")
        self.blocks = part[: len(part) // length * length].view(-1, length)
        self.seed = seed
        self._order: dict[int, Tensor] = {}

    def batch(self, step: int, size: int) -> Tensor:
        """The blocks of a step."""
        return torch.stack([self.blocks[self._place(step * size + i)] for i in range(size)]).long()

    def _place(self, sample: int) -> int:
        epoch, place = divmod(sample, len(self.blocks))
        if epoch not in self._order:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = {epoch: torch.randperm(len(self.blocks), generator=generator)}
        return int(self._order[epoch][place])


class TextTask:
    """What is trained on, and what is looked at besides."""

    def __init__(self, text: str, length: int, batch: int, seed: int) -> None:
        self.text, self.length, self.size = text, length, batch
        self.blocks = TrainingBlocks(text, length, seed)

    def batch(self, step: int) -> dict[str, Any]:
        """The blocks of a step."""
        return _inputs(self.blocks.batch(step, self.size))

    def held_out(self, part: str, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """`count` blocks of the validation or of the test text in batches, each with its size."""
        for ids in held_out(self.text, part, self.length, count).split(32):
            yield len(ids), _inputs(ids)


def _inputs(ids: Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def held_out(text: str, part: str, length: int, count: int) -> Tensor:
    """`count` blocks at even distances over the validation or the test part: the same for every run."""
    data = split(text, part)
    starts = torch.linspace(0, len(data) - length, count).long()
    return torch.stack([data[start : start + length] for start in starts.tolist()]).long()
