"""The moving average of the weights, which often classifies and predicts better than the weights themselves.

Enters: a model and, after every optimizer step, its new weights. Leaves: ema.safetensors in every checkpoint, whole
tensors by the names of the parameters, and the number of updates. The decay of update t, from 0, is at most
(1 + t) / (10 + t), so that a short run does not average over its beginning. When the model grows, the average grows by
the same step and the same seed: it computes what it did before, as the model does.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..growth import Growth, apply_growth
from ..models import TokenFormerPreTrainedModel
from ..models.loading import read_model
from .distributed import gathered, like, local

FILE = "ema.safetensors"


class WeightAverage:
    """An exponential moving average of a model's parameters, sharded over the processes as they are."""

    def __init__(self, model: nn.Module, decay: float, checkpoint: Path) -> None:
        self.decay = decay
        saved, self.updates = read(checkpoint)
        self._parameters = dict(model.named_parameters())
        self._averages = {
            name: like(saved[name], parameter) if saved else parameter.detach().clone()
            for name, parameter in self._parameters.items()
        }

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(local(self._averages[name]), local(p.detach())) for name, p in self._parameters.items()]

    def update(self) -> None:
        """To be called after every optimizer step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages, parameters = zip(*self._pairs(), strict=True)
        get_ema_multi_avg_fn(decay)(list(averages), list(parameters), self.updates)
        self.updates += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the average for weights, for a while."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        # By copying, not by changing places: FSDP and the optimizer know the parameters' memory.
        for average, parameter in self._pairs():
            weights = parameter.clone()
            parameter.copy_(average)
            average.copy_(weights)

    def save(self, folder: Path, *, write: bool) -> None:
        """Every process must call it; one writes."""
        tensors = gathered(self._averages, keep=write)
        if write:
            _write(folder, tensors, self.updates)


def read(folder: Path) -> tuple[dict[str, Tensor], int]:
    """The average in a checkpoint by parameter name, and its updates; empty if there is none."""
    if not (folder / FILE).exists():
        return {}, 0
    with safe_open(folder / FILE, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, int(file.metadata()["updates"])  # noqa: SIM118


def _write(folder: Path, tensors: Mapping[str, Tensor], updates: int) -> None:
    save_file(dict(tensors), folder / FILE, metadata={"updates": str(updates)})


@torch.no_grad()
def averaged_model(checkpoint: Path) -> tuple[TokenFormerPreTrainedModel, int] | None:
    """The model of a checkpoint with the average for weights, and its updates; None if there is none."""
    averages, updates = read(checkpoint)
    if not averages:
        return None
    model = read_model(checkpoint)
    for name, parameter in model.named_parameters():
        parameter.copy_(averages[name])
    return model, updates


def grow_average(source: Path, target: Path, growth: Growth) -> None:
    """Grow the average in a checkpoint, if it has one, as its model grows."""
    found = averaged_model(source)
    if found is None:
        return
    model, updates = found
    grown = apply_growth(model, growth, inplace=True)
    _write(target, {name: parameter.detach() for name, parameter in grown.named_parameters()}, updates)
