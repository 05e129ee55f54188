"""Training only the new tokens of a grown model (`growth: trains: new`) against training all of it.

    python benchmarks/new_tokens.py [--quick] [--repeats N] [--out FOLDER]

Leaves: the ratio of step times after growing 2 and 4 times, and of each part: forward, backward, optimizer; beside it
the limit that the matrix products set; benchmarks/results/new_tokens.json.
"""

import torch
from models import PHASES, TrainingStep, build, count, shape_of, token_former
from suite import Figure, Options, figure, run
from timing import in_turns
from torch import nn

from tokenformer import grow
from tokenformer.growth import Growth
from tokenformer.training.held_rows import FrozenRows

SHAPES = [((256, 4, 256), 2, 1024), ((768, 1, 768), 2, 1024)]  # model before growth, batch, context
QUICK_SHAPES = [((64, 1, 32), 1, 32)]
FACTORS = (2, 4)


class NewTokensStep(TrainingStep):
    """As the trainer does it: old rows get no gradient, and are put back after the optimizer's step."""

    def __init__(self, model: nn.Module, growth: Growth, batch: int, context: int) -> None:
        self.frozen = FrozenRows(model, growth)
        super().__init__(model, batch, context)

    def update(self) -> None:
        self.frozen.clear_gradients()
        self.optimizer.step()
        self.frozen.put_back()
        self.optimizer.zero_grad(set_to_none=True)


def limit(frozen_share: float) -> float:
    """Of a Pattention's six products two give the tokens' gradients, and those of frozen tokens can be left out."""
    return 6 / (6 - 2 * frozen_share)


def measure(options: Options) -> list[Figure]:
    """Both steps in turns, at every shape and factor."""
    figures = []
    for shape, batch, context in QUICK_SHAPES if options.quick else SHAPES:
        torch.manual_seed(options.seed)
        small = build(token_former(*shape, context))
        for factor in FACTORS:
            models = {trained: grow(small, factor) for trained in ("all", "new")}
            steps = {
                "all": TrainingStep(models["all"], batch, context),
                "new": NewTokensStep(models["new"], models["new"].last_growth, batch, context),
            }
            times = in_turns(steps, options.repeats)
            phases = {trained: step.phase_medians(options.repeats) for trained, step in steps.items()}
            details = {
                "shape": shape_of(models["all"], batch, context),
                "parameters_before": count(small),
                "median_seconds": times.medians,
                "phase_seconds": phases,
            }
            at = f"training new tokens only, d {shape[0]}, grown {factor}x"
            figures += [
                figure(f"{at}: times as fast as training all", times.speedup("new", over="all"), **details),
                figure(f"{at}: limit by matmuls of Pattention", limit(1 / factor)),
            ]
            figures += [
                figure(f"{at}, {phase}: times as fast", phases["all"][phase] / phases["new"][phase]) for phase in PHASES
            ]
    return figures


if __name__ == "__main__":
    run(measure, __doc__)
