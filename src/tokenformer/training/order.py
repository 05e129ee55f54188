"""The order of the data: one fixed sequence of blocks or images for the whole ladder.

Sample i of a run is the same one whatever the stage, the number of processes, or how often the run was resumed. Of
prepared data, epoch e is a permutation drawn from (seed, e); of a stream, the order is the stream's own, and its place
is kept with every checkpoint. Epochs follow each other without end.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from ..data import BlockStream

# Where a stream of data stands; prepared data needs no more than the step.
STREAM_FILE = "stream.pt"


class OrderedBlocks(Dataset):
    """`samples` items of a map-style dataset, shuffled epoch by epoch."""

    def __init__(self, blocks: Any, samples: int, seed: int) -> None:
        self.blocks, self.samples, self.seed = blocks, samples, seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.samples

    def row(self, index: int) -> int:
        """Which item of the dataset is sample `index` of the run."""
        epoch, position = divmod(index, len(self.blocks))
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed % 2**64, epoch)).permutation(len(self.blocks))
            self._epoch = epoch
        return int(self._order[position])

    def __getitem__(self, index: int) -> Any:
        return self.blocks[self.row(index)]


class OrderedImages(OrderedBlocks):
    """The same order of images, each augmented for its place in the run."""

    def __getitem__(self, index: int) -> Any:
        return self.blocks.augmented(self.row(index), index)


class StreamedBlocks(IterableDataset):
    """The blocks of a stream from a checkpoint's place on, with the place after each step remembered for a while.

    The data loader reads ahead of training, so that where the stream is now is not where training is.
    """

    def __init__(
        self, stream: BlockStream, blocks_per_step: int, steps_done: int, state: dict[str, Any] | None
    ) -> None:
        self.stream, self.blocks_per_step, self.state = stream, blocks_per_step, state
        self._given = steps_done * blocks_per_step
        self._marks: deque[tuple[int, Any]] = deque(maxlen=16)

    def __iter__(self) -> Iterator[Any]:
        if self.state is not None:
            self.stream.load_state_dict(self.state)
        epoch = self.state["epoch"] if self.state else 0
        while True:
            self.stream.set_epoch(epoch)
            for block in self.stream:
                yield block
                self._given += 1
                if self._given % self.blocks_per_step == 0:
                    self._marks.append((self._given // self.blocks_per_step, self.stream.mark()))
            epoch += 1

    def state_after(self, step: int) -> dict[str, Any]:
        """The place of the stream when `step` steps have been made."""
        for marked, place in self._marks:
            if marked == step:
                return self.stream.state_dict(place)
        # The last block of the step has been given, and nothing after it.
        return self.stream.state_dict()
