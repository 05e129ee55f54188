"""What differs between training on text (text_task.py) and on images (image_task.py); the rest of this room asks.

Enters: the data section of a recipe. Leaves: what a step counts, how samples are prepared, ordered and measured, and
what a model has to know of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import nn
from torch.utils.data import Dataset

from ..cost import TrainingMemory
from ..models import TokenFormerBaseConfig, TokenFormerPreTrainedModel


class Task(Protocol):
    """What training asks of a kind of data. `data` is always what `prepare` returned."""

    def __init__(self, section: Any) -> None:
        """Of the data section."""

    kind: ClassVar[str]  # of a recipe
    mark: ClassVar[str]  # how a recipe is known to be of that kind
    unit: ClassVar[str]  # what a step counts, and FLOPs are for
    one_unit: ClassVar[str]
    budgets: ClassVar[tuple[str, ...]]  # the keys of a stage that say how long it is
    settings: ClassVar[dict[str, Any]]  # keys of the training section that only it has, with their defaults
    decided: ClassVar[dict[str, str]]  # fields of TrainingArguments that it decides, and what to say instead
    data_class: ClassVar[type]  # of the data section
    config_class: ClassVar[type[TokenFormerBaseConfig]]
    model_class: ClassVar[type[TokenFormerPreTrainedModel]]
    model_keys: ClassVar[tuple[str, ...]]  # of the model section, beside the fields of the configuration

    @property
    def samples(self) -> str:
        """What a batch is so many of."""

    @property
    def units_per_sample(self) -> int:
        """Tokens of a block; 1 for images."""

    @property
    def sources(self) -> list[str]:
        """What is trained on and what is held out, by the names that the recipe has for it."""

    def check(self, training: dict[str, Any], batch: int) -> None:
        """Refuse what the data cannot do, before it is read. `batch` is that of a process."""

    def foresee(self, epochs: bool) -> Any:
        """What can be known of the data without reading it, or None. With `epochs` its length must be known."""

    def prepare(self, console: Any) -> Any:
        """Read the data as the recipe says."""

    def implied(self, model: dict[str, Any], data: Any) -> dict[str, Any]:
        """Fields of the configuration that follow from the data, unless the model section has them."""

    def refitted(self) -> dict[str, Any]:
        """Fields that the data decides also where a checkpoint decides the model."""

    def settle(self, config: Any, data: Any) -> None:
        """Refuse a configuration that does not fit the data; set what training wants of it."""

    def first_model(self, config: Any, checkpoint: str | None) -> tuple[TokenFormerPreTrainedModel, bool]:
        """The model before the first step, and whether it is to the last parameter that of a checkpoint."""

    def for_use(self, config: Any) -> None:
        """Take back what only training wants of a configuration."""

    def arguments(self, data: Any, training: dict[str, Any]) -> dict[str, Any]:
        """Fields of TrainingArguments that follow from the data."""

    def ordered(self, data: Any, steps: int, samples_per_step: int, checkpoint: Path) -> Dataset:
        """The training samples of the whole run, in its order; a stream from the checkpoint's place on."""

    def collate(self, data: Any) -> Callable[[Any], Any] | None:
        """The function that makes a batch of samples; None for the usual one."""

    def held_out(self, data: Any, training: dict[str, Any]) -> Dataset | None:
        """The samples that one validation looks at."""

    def score(self, model: nn.Module, batch: Any) -> dict[str, float]:
        """What is measured, summed over the samples of a batch."""

    def save_beside(self, data: Any, folder: Path) -> None:
        """Write what stands beside a model's weights: a tokenizer, or how images become pixels."""

    def bad_samples(self, data: Any) -> list[str]:
        """Names of samples that could not be read, of those that this process has asked for."""

    def flops(self, config: Any) -> tuple[float, float]:
        """Of a forward pass and of training, for one unit."""

    def assumed(self, config: Any, data: Any) -> dict[str, str]:
        """For a dry run: what `foresee` did not know and the figures rest on."""

    def memory(self, config: Any, batch: int, gradient_checkpointing: bool) -> TrainingMemory:
        """Of a training step of one process."""
