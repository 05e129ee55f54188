"""The growth step itself: a model and its AdamW state, grown in place, in a fresh process.

    python benchmarks/growth_step.py [--quick] [--repeats N] [--out FOLDER]

Leaves: seconds of growing preset 124m to 354m, and the peak of resident memory against what the grown model and its
optimizer state need; benchmarks/results/growth_step.json.
"""

import statistics
from collections.abc import Callable

import torch
from memory import fresh_peak_of, in_fresh_process
from models import TrainingStep, build, count
from suite import Figure, Options, figure, run
from timing import seconds

from tokenformer import TokenFormerConfig, grow, grow_optimizer


def prepare_growth(small: str, large: str) -> Callable[[], dict[str, float]]:
    """Building the small model with its state, and growing both."""
    TrainingStep(build(TokenFormerConfig.preset("tiny")), 1, 8)()  # loads what a first step loads

    def work() -> dict[str, float]:
        model = build(TokenFormerConfig.preset(small))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        growing = seconds(lambda: grow(model, to=large, inplace=True))
        following = seconds(lambda: grow_optimizer(optimizer, model, model))
        state = sum(moments.nbytes for entry in optimizer.state.values() for moments in entry.values())
        weights = sum(parameter.nbytes for parameter in model.parameters())
        return {"grow": growing, "grow_optimizer": following, "needed": weights + state, "parameters": count(model)}

    return work


def grow_once(small: str, large: str) -> dict[str, float]:
    """Without a look at the memory."""
    return prepare_growth(small, large)()


def measure(options: Options) -> list[Figure]:
    """Grow in a fresh process, a few times for the seconds and once for the memory."""
    small, large = ("tiny", "tiny-2x") if options.quick else ("124m", "354m")
    result, peak = fresh_peak_of(prepare_growth, small, large)
    runs = [result] if options.quick else [in_fresh_process(grow_once, small, large) for _ in range(options.repeats)]
    times = [{phase: one[phase] for phase in ("grow", "grow_optimizer")} for one in runs]
    details = {"shape": {"from": small, "to": large, "parameters": result["parameters"]}, "seconds": times}
    at = f"growth step {small} -> {large} with AdamW's state"
    return [
        figure(f"{at}: seconds", statistics.median(sum(phases.values()) for phases in times), **details),
        figure(
            f"{at}: peak memory over what is needed after",
            peak / result["needed"],
            at_most=1.1,
            peak_bytes=peak,
            needed_bytes=result["needed"],
            **details,
        ),
    ]


if __name__ == "__main__":
    run(measure, __doc__, repeats=3)
