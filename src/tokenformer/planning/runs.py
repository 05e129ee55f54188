"""What finished runs say: of a scaling law, and of how much training survives growth.

Enters: folders of `tokenformer train`. Leaves: those trained from scratch as points for a law, and ladders as their
stages. Only what a run ended with counts, after its learning rate had decayed.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import yaml

from ..errors import BadRequestError
from ..report.read import Run, load_runs
from .climb import Size, climbed
from .law import FinishedRun, ScalingLaw


@dataclass(frozen=True)
class FinishedLadder:
    """The stages of a run that grew, each with what it saw, and the loss at the end."""

    label: str
    stages: tuple[tuple[Size, float], ...]
    loss: float


def read_finished(folders: Sequence[str | os.PathLike]) -> tuple[list[FinishedRun], list[FinishedLadder]]:
    """Runs from scratch, and ladders."""
    scratch, ladders = [], []
    for run in load_runs(folders):
        last = _last_stage(run)
        rows = run.stages
        if len(rows) < last or not rows[-1].ended:
            raise BadRequestError(
                f"{run.folder} is in stage {len(rows)} of {last}; train it to the end, or leave it out"
            )
        loss = rows[-1].loss
        if loss is None:
            raise BadRequestError(f"{run.folder} has no validation loss at its end; leave it out")
        if len(rows) == 1:
            scratch.append(FinishedRun(rows[0].parameters, rows[0].seen, loss))
        else:
            stages = tuple((Size(str(row.number), row.parameters, row.flops / row.seen), row.seen) for row in rows)
            ladders.append(FinishedLadder(run.label, stages, loss))
    return scratch, ladders


def _last_stage(run: Run) -> int:
    """How many stages the run's recipe has; a recipe that starts from a checkpoint says nothing of a law."""
    try:
        recipe = yaml.safe_load(run.recipe or "") or {}
        checkpoint, stages = recipe["model"].get("checkpoint"), recipe["growth"].get("stages")
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        raise BadRequestError(f"{run.folder / 'recipe.yaml'} is missing or damaged; leave the run out") from None
    if checkpoint:
        raise BadRequestError(
            f"{run.folder} started from {checkpoint}, so what it has seen is not known; choose runs from scratch"
        )
    return len(stages or [None])


def fitted_transfer(law: ScalingLaw, ladders: Sequence[FinishedLadder]) -> float:
    """The share of training that survives growth, by which the law predicts the ends of these ladders best."""

    def off(transfer: float) -> float:
        return sum(math.log(climbed(law, ladder.stages, transfer).loss / ladder.loss) ** 2 for ladder in ladders)

    return float(min(np.arange(0.05, 1.505, 0.01), key=off))
