"""The order of the data: one fixed sequence of blocks for the whole ladder.

Sample i of a run is the same block whatever the stage, the number of processes, or how often the run was resumed: epoch
e is a permutation drawn from (seed, e), and epochs follow each other.
"""

from typing import Any

import numpy as np
from torch.utils.data import Dataset


class OrderedBlocks(Dataset):
    """`samples` items of a map-style dataset, shuffled epoch by epoch."""

    def __init__(self, blocks: Any, samples: int, seed: int) -> None:
        self.blocks, self.samples, self.seed = blocks, samples, seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        epoch, position = divmod(index, len(self.blocks))
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(len(self.blocks))
            self._epoch = epoch
        return self.blocks[int(self._order[position])]
