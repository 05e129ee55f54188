"""A corpus that does not fit on the disk as blocks: read, tokenized, packed and shuffled while training.

`BlockStream` is the stream itself; `StreamedBlocks` is what a run trains on, from a checkpoint's place on.

Enters: a corpus and an encoder. Leaves: blocks, endlessly resumable: `state_dict` after any block and
`load_state_dict` in another process give exactly the blocks that would have come. The order is one for all; shard s of
n takes every n-th block of it, where the shards are the workers of the data loaders of all ranks.
"""

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from ...errors import BadRequestError
from ..base import StreamInOrder
from .documents import START, Corpus, Place
from .encode import Encoder, naming_bad_text, token_type


@dataclass
class _Position:
    """How far the stream has come: everything that the next blocks depend on."""

    epoch: int
    random: np.random.Generator
    carry: np.ndarray  # ids that are not in a block yet
    place: Place = START  # where the next piece begins
    document: int = 0  # the number of its document in the corpus
    buffer: list[np.ndarray] = field(default_factory=list)


class BlockStream(IterableDataset[dict[str, Tensor]]):
    """Blocks from a corpus, in an order that depends on the seed and the epoch.

    `held_out` is true for the documents, by their number, that are left out.
    """

    def __init__(
        self,
        corpus: Corpus,
        encoder: Encoder,
        block_length: int,
        seed: int = 0,
        shuffle_buffer: int = 0,
        held_out: np.ndarray | None = None,
    ):
        self.corpus, self.encoder, self.block_length = corpus, encoder, block_length
        self.seed, self.shuffle_buffer = seed, shuffle_buffer
        self.held_out = np.zeros(0, bool) if held_out is None else held_out
        self.rank, self.world_size = 0, 1
        self._position = self._start(0)
        self._resumed = False

    def for_rank(self, rank: int, world_size: int) -> "BlockStream":
        """Make this the share of one rank. Not under accelerate or the Trainer, which share out blocks themselves."""
        if not 0 <= rank < world_size:
            raise BadRequestError(f"rank {rank} of {world_size} was given; ranks count from 0")
        self.rank, self.world_size = rank, world_size
        return self

    def set_epoch(self, epoch: int) -> None:
        """Another epoch has another order. The epoch of a loaded state is kept where it was."""
        if epoch != self._position.epoch:
            self._position = self._start(epoch)
            self._resumed = False

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if not self._resumed:
            self._position = self._start(self._position.epoch)
        self._resumed = False
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        shards, shard = self.world_size * workers, self.rank * workers + number
        blocks = self._shuffled(self._position)
        # Whole rounds only: every shard gets the same number of blocks, and no rank waits for another at the end.
        while len(turn := list(islice(blocks, shards))) == shards:
            ids = torch.from_numpy(turn[shard].astype(np.int64))  # [block_length]
            yield {"input_ids": ids, "labels": ids}

    def mark(self) -> _Position:
        """Where the stream is now, cheaply, for a `state_dict` that may be asked for later."""
        at = self._position
        return replace(at, random=copy.deepcopy(at.random), buffer=list(at.buffer))

    def state_dict(self, at: _Position | None = None) -> dict[str, Any]:
        """Where the stream is: after the last block it gave, and after those that other shards have had by then.

        With a mark `at`: where it was then.
        """
        at = at or self._position
        buffer = np.stack(at.buffer) if at.buffer else np.zeros((0, self.block_length))
        return {
            "made_with": self._made_with(),
            "epoch": at.epoch,
            "place": list(at.place),
            "document": at.document,
            "carry": torch.from_numpy(at.carry.astype(np.int64)),
            "buffer": torch.from_numpy(buffer.astype(np.int64)),
            "random": at.random.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there at the next iteration. The number of shards may have changed."""
        if state["made_with"] != self._made_with():
            raise BadRequestError(
                f"the state is of a stream with {state['made_with']}, and this one has {self._made_with()}"
            )
        self._position = self._start(state["epoch"])
        at, dtype = self._position, self._position.carry.dtype
        at.place, at.document = Place(*state["place"]), state["document"]
        at.carry = state["carry"].numpy().astype(dtype)
        at.buffer = list(state["buffer"].numpy().astype(dtype))
        at.random.bit_generator.state = state["random"]
        self._resumed = True

    def _made_with(self) -> dict[str, Any]:
        return {
            "tokenizer": self.encoder.fingerprint,
            "block_length": self.block_length,
            "seed": self.seed,
            "shuffle_buffer": self.shuffle_buffer,
            "sources": len(self.corpus.sources),
        }

    def _start(self, epoch: int) -> _Position:
        random = np.random.default_rng([self.seed % 2**64, epoch])
        return _Position(epoch, random, np.zeros(0, token_type(self.encoder.vocab_size)))

    def _shuffled(self, at: _Position) -> Iterator[np.ndarray]:
        """Each new block takes a random place in the buffer, and what was there leaves it."""
        for block in self._packed(at):
            if len(at.buffer) < self.shuffle_buffer:
                at.buffer.append(block)
                continue
            if self.shuffle_buffer:
                slot = at.random.integers(self.shuffle_buffer)
                block, at.buffer[slot] = at.buffer[slot], block
            yield block
        while at.buffer:
            slot = at.random.integers(len(at.buffer))
            at.buffer[slot], at.buffer[-1] = at.buffer[-1], at.buffer[slot]
            yield at.buffer.pop()

    def _packed(self, at: _Position) -> Iterator[np.ndarray]:
        """Blocks in the order of the corpus. The tail that fills none is dropped."""
        pieces = self.corpus.pieces(at.place)
        while True:
            while len(at.carry) >= self.block_length:
                block, at.carry = at.carry[: self.block_length].copy(), at.carry[self.block_length :]
                yield block
            piece = next(pieces, None)
            if piece is None:
                return
            if at.document >= len(self.held_out) or not self.held_out[at.document]:
                with naming_bad_text(self.corpus):
                    at.carry = np.concatenate((at.carry, self.encoder([piece]).ids))
            at.place = piece.next_place
            at.document += piece.last


class StreamedBlocks(StreamInOrder):
    """The blocks of a stream from a checkpoint's place on, with the place after each step remembered for a while.

    The data loader reads ahead of training, so the stream's place is not that of training.
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
