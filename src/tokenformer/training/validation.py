"""Validation, and the proof that growth did not change the loss.

Enters: a model and held-out samples. Leaves: the mean loss and, of images, the accuracy, the same to the bit however
many processes share the work: the samples are always cut into the same batches, and their sums added in one order. Not
Trainer's own evaluation: called outside of training it prepares the model in a way that `train` then takes for done,
and gradients are not shared any more.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..errors import BadResultError
from .distributed import reshard
from .ema import WeightAverage

# Exact growth must not change the loss: a rise beyond rounding means that something is wrong.
LARGEST_RISE = 1e-3


class GrowthRiseError(BadResultError):
    """The validation loss rose at the moment of an exact growth step."""


@dataclass
class Validation:
    """Held-out samples. `score` gives what is measured, summed over the samples of a batch."""

    samples: Dataset
    score: Callable[[nn.Module, Any], dict[str, float]]
    collate: Callable[[Any], Any] | None
    batch_size: int
    workers: int

    @torch.no_grad()
    def measure(self, model: nn.Module, device: torch.device, average: WeightAverage | None) -> dict[str, float]:
        """Means over all samples: of the weights and, with names that begin with ema_, of their average.

        Every process must call it, and makes as many forward passes as the others.
        """
        model.eval()
        processes, sums = PartialState(), []
        size = len(self.samples)  # type: ignore[arg-type]
        batches = [range(i, min(i + self.batch_size, size)) for i in range(0, size, self.batch_size)]
        count = processes.num_processes
        rounds = -(-len(batches) // count)
        # Where there are too few batches for the last round, one is measured that another process counts.
        own = [min(i * count + processes.process_index, len(batches) - 1) for i in range(rounds)]
        loader = DataLoader(
            self.samples,
            batch_sampler=[batches[i] for i in own],
            collate_fn=self.collate,
            num_workers=min(self.workers, len(own)),
            generator=torch.Generator(),  # the loader draws a number, which must not be one of training's
        )
        for i, samples in zip(own, loader, strict=True):
            batch = {key: value.to(device) for key, value in samples.items()}
            found = self.score(model, batch)
            reshard(model)
            if average is not None:
                with average.in_place():
                    found |= {f"ema_{name}": value for name, value in self.score(model, batch).items()}
                    reshard(model)
            sums.append((i, found))
        measured = dict(gather_object(sums))  # by batch, those that were measured twice once
        return {name: math.fsum(batch[name] for _, batch in sorted(measured.items())) / size for name in measured[0]}


def validation_names(measured: Mapping[str, float]) -> dict[str, float]:
    """The same by the names of metrics.jsonl: ema_loss, of the average of the weights, is ema_validation_loss."""
    return {
        f"ema_validation_{name.removeprefix('ema_')}" if name.startswith("ema_") else f"validation_{name}": value
        for name, value in measured.items()
    }


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Without the mixed precision that accelerate puts around the forward pass when training begins."""
    mixed = model.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if mixed is not None:
            model.forward = mixed


def check_loss_unchanged(
    before: Mapping[str, Any], after: Mapping[str, float], stage: int, method: str, folder: Path
) -> None:
    """Compare what was measured just after growth into a stage with what the one before, in `folder`, ended with."""
    for name in after:
        was = before.get(name)
        if not name.endswith("loss") or was is None or method == "random":
            continue
        # Written so that NaN fails too.
        if not after[name] - was <= LARGEST_RISE:
            raise GrowthRiseError(
                f"the {name.replace('_', ' ')} rose from {was:.4f} to {after[name]:.4f} when the model grew into stage "
                f"{stage} by {method}, which must not change it; the run as it was before is in {folder}"
            )
