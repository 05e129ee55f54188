"""TrainingData: what training asks of data, whether it is text (text/data.py) or images (images/data.py).

Enters: the data section of a recipe. Leaves: samples in the order of a run, batches of them, what a model has to know
of them, and what is saved beside it. Only recipes, their settings and their summary know which of the two it is.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from typing_extensions import Self

from ..cost import TrainingMemory
from ..models import TokenFormerBaseConfig, TokenFormerPreTrainedModel
from ..schema import Section

PARTS = ("train", "validation", "test")
# In a checkpoint: the place in a stream of data. Of prepared data the step says it all.
STREAM_FILE = "stream.pt"
# What an error says of a key that only the other kind of recipe has.
ONLY_FOR_IMAGES = "is only for images, and this recipe is for text, because data.images is not given"
ONLY_FOR_TEXT = "is only for text, and this recipe is for images, because data.images is given"


class TrainingData(ABC):
    """Data for training. Until `prepare` is called, only what the settings say is known."""

    unit: ClassVar[str]  # what a step counts, and what FLOPs are given for
    per_unit: ClassVar[str]
    settings: Section
    config_class: ClassVar[type[TokenFormerBaseConfig]]
    model_class: ClassVar[type[TokenFormerPreTrainedModel]]

    train: Any  # the training samples
    validation: Any = None  # the held-out ones, or None
    key: str  # stands for the content of all parts: a run goes on with no other

    @property
    @abstractmethod
    def samples_name(self) -> str:
        """What a batch is made of, in words: blocks of 256, images."""

    @property
    @abstractmethod
    def units_per_sample(self) -> int:
        """Tokens in a block; 1 for images."""

    @property
    @abstractmethod
    def sources(self) -> list[str]:
        """What is trained on and what is held out, by the names that the recipe gives."""

    @abstractmethod
    def check(self, batch: int, loader_workers: int) -> None:
        """Refuse what this data cannot do, before it is read. `batch` is that of a process."""

    @abstractmethod
    def inspect(self, *, count_samples: bool) -> None:
        """Find out what a model has to know without reading the data; with `count_samples`, its length too."""

    @abstractmethod
    def prepare(self, console: Console | None = None) -> Self:
        """Read the data. Progress is shown on the console, stderr if None."""

    @abstractmethod
    def config_fields(self, given: dict[str, Any]) -> dict[str, Any]:
        """Fields of a model's configuration that follow from the data, beside those that the recipe has given."""

    def adjust_checkpoint_config(self, config: Any) -> None:  # noqa: B027 (most data decides nothing)
        """Set those fields of a checkpoint's configuration that the data decides."""

    @abstractmethod
    def adjust_config(self, config: Any) -> None:
        """Refuse a configuration that does not fit the data, and set what training needs in it."""

    def restore_config(self, config: Any) -> None:  # noqa: B027 (most data needs nothing)
        """Undo what only training needs in a configuration, before its model is saved for use."""

    @abstractmethod
    def first_model(self, config: Any, checkpoint: str | None) -> tuple[TokenFormerPreTrainedModel, bool]:
        """The model before the first step, and whether every parameter of it comes from the checkpoint."""

    @abstractmethod
    def implied_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Fields of TrainingArguments that follow from the data and from those that the recipe has given."""

    @abstractmethod
    def in_order(self, steps: int, samples_per_step: int, checkpoint: Path) -> Dataset:
        """The training samples of a whole run, one fixed sequence; a stream continues from the checkpoint's place."""

    collate: Any = None  # makes a batch of samples; None: as torch does

    @abstractmethod
    def held_out(self, most: int | None) -> Dataset | None:
        """The samples that one validation looks at, at most `most`."""

    @abstractmethod
    def score(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, float]:
        """What validation measures, summed over the samples of a batch."""

    @abstractmethod
    def save_beside(self, folder: Path) -> None:
        """Write what belongs beside a model's weights: the tokenizer, or how images become pixels."""

    def unreadable(self) -> list[str]:
        """Names of samples that this process asked for and that could not be read."""
        return []

    def assumptions(self, config: Any) -> dict[str, str]:
        """For a dry run: what its figures rest on that `inspect` could not find out."""
        return {}

    @abstractmethod
    def flops(self, config: Any) -> tuple[float, float]:
        """FLOPs of a forward pass and of training, for one unit."""

    @abstractmethod
    def memory(self, config: Any, batch: int, optimizer: str, gradient_checkpointing: bool) -> TrainingMemory:
        """What a training step of one process needs."""


class Shuffled(Dataset):
    """`samples` items of a map-style dataset, shuffled epoch by epoch: the order of a whole run.

    Sample i is the same one whatever the stage, the number of processes, or how often the run was resumed: epoch e is a
    permutation drawn from (seed, e), and epochs follow each other without end.
    """

    def __init__(self, items: Any, samples: int, seed: int) -> None:
        self.items, self.samples, self.seed = items, samples, seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.samples

    def row(self, index: int) -> int:
        """Which item of the dataset is sample `index` of the run."""
        epoch, position = divmod(index, len(self.items))
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed % 2**64, epoch)).permutation(len(self.items))
            self._epoch = epoch
        return int(self._order[position])

    def __getitem__(self, index: int) -> Any:
        return self.items[self.row(index)]


class StreamInOrder(IterableDataset, ABC):
    """The samples of a run from a stream, whose place is saved with every checkpoint."""

    @abstractmethod
    def state_after(self, step: int) -> dict[str, Any]:
        """The place of the stream when `step` steps have been made."""


def seeded(digests: np.ndarray, seed: int) -> np.ndarray:
    """Each 64-bit digest mixed with the seed, one to one, by the steps of splitmix64; they decide what is held out."""
    mixed = digests + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_split(split: Sequence[float] | None, validation: object) -> None:
    """Refuse shares that do not add up, and a split beside validation sources."""
    if split is None:
        return
    if len(split) not in (2, 3) or min(split) <= 0 or abs(sum(split) - 1) > 1e-6:
        raise ValueError(
            f"split={list(split)} was given; it must be two or three positive shares that add up to 1, "
            "as [0.9, 0.05, 0.05]"
        )
    if validation is not None:
        raise ValueError("both split and validation were given; one of them decides what is held out")
