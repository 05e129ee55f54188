"""The data of an index, as windows that can be read in any order: what a batch is made of, and what a context shows.

Enters: ids in one row, which are cut; ids in rows; or a dataset, a sequence of dicts with `input_ids` or
`pixel_values`. Leaves: batches for a model, the ids around a position, and a digest of all of it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import BadRequestError
from ..shrinking.measure import Batch

HASHED = 2**24  # ids at a time


class Windows:
    """Windows of ids, or images: `len(windows)`, `batch(first, last)`, `around(window, position, before, after)`."""

    def __init__(self, data: Any, length: int, tokens: int | None) -> None:
        """Of `data` the first `tokens`, in windows of `length` where it is one row."""
        if isinstance(data, Mapping | str | bytes) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise BadRequestError(
                f"index_tokens: the data is a {type(data).__name__}; give ids, in one row or in several, or a sequence "
                "of dicts with input_ids or pixel_values"
            )
        self.length = length
        self._ids: Tensor | None = None
        self._items: Sequence[Any] = ()
        if isinstance(data, Tensor | np.ndarray) or (len(data) and isinstance(data[0], int)):
            self._ids = self._cut(torch.as_tensor(data), tokens)
            self.length = self._ids.shape[1]
        else:
            self._items = data
        self.items = len(self._items) if self._ids is None else len(self._ids)
        if not self.items:
            raise BadRequestError("index_tokens: the data is empty; give at least one window of ids, or one image")
        if self._ids is None and not {"input_ids", "pixel_values"} & set(self._items[0]):
            raise BadRequestError(
                f"index_tokens: a row of the data has {', '.join(self._items[0])}; input_ids or pixel_values are needed"
            )
        if self._ids is None and tokens is not None:
            self.items = min(self.items, max(1, tokens // max(1, self._size())))

    def _cut(self, ids: Tensor, tokens: int | None) -> Tensor:
        if ids.is_floating_point() or ids.dim() not in (1, 2):
            raise BadRequestError(
                f"index_tokens: a tensor of {ids.dtype} and shape {tuple(ids.shape)} was given; ids are needed, [n] or "
                "[rows, length]"
            )
        if ids.dim() == 2:
            return ids if tokens is None else ids[: max(1, tokens // ids.shape[1])]
        ids = ids[:tokens]
        length = min(self.length, len(ids))
        return ids[: len(ids) // length * length].view(-1, length) if length else ids.view(0, 1)

    def __len__(self) -> int:
        return self.items

    def _size(self) -> int:
        """About how many positions an item has."""
        found = self._items[0].get("input_ids")
        return self.length if found is None else len(found)

    @property
    def positions(self) -> int:
        """About how many there are in all."""
        return self.items * (self.length if self._ids is not None else self._size())

    def batch(self, first: int, last: int) -> Batch:
        """Windows from `first` up to `last`."""
        if self._ids is not None:
            return {"input_ids": self._ids[first:last].long()}
        items = [self._items[i] for i in range(first, last)]
        if "pixel_values" in items[0]:
            return {"pixel_values": torch.stack([torch.as_tensor(item["pixel_values"]) for item in items])}
        rows = [torch.as_tensor(item["input_ids"]).long() for item in items]
        there = [torch.ones_like(row) for row in rows]
        padded = {"input_ids": rows, "attention_mask": there}
        return {name: pad_sequence(found, batch_first=True) for name, found in padded.items()}

    def around(self, window: int, position: int, before: int, after: int) -> tuple[list[int], int]:
        """The ids around a position, and where among them it is; of an image none."""
        ids = self._ids[window] if self._ids is not None else self._items[window].get("input_ids")
        if ids is None:
            return [], 0
        first = max(0, position - before)
        return torch.as_tensor(ids[first : position + after + 1]).tolist(), position - first

    def digest(self) -> str:
        """Of all ids; of a dataset, of its first and its last row and how many there are."""
        found = hashlib.blake2b(f"{self.items} {self.length}".encode(), digest_size=16)
        if self._ids is not None:
            for part in self._ids.flatten().split(HASHED):
                found.update(part.contiguous().numpy().tobytes())
        else:
            for item in (self._items[0], self._items[self.items - 1]):
                for key in ("input_ids", "pixel_values"):
                    if key in item:
                        found.update(torch.as_tensor(item[key]).contiguous().numpy().tobytes())
        return found.hexdigest()
