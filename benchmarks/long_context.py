"""A grown language model (four times d tokens a projection) against a GPT-NeoX of equal parameters, by context length.

    python benchmarks/long_context.py [--quick] [--repeats N] [--out FOLDER]

A Transformer of as many parameters is wider, and pays for width in every pair of positions. Leaves: the ratio of
tokens per second of a training step at each length, measured, beside the ratio that FLOPs promise; the length from
which ours is faster; memory at the lengths that have a target; benchmarks/results/long_context.json.
"""

import itertools
import math

from memory import fresh_peak_of, kept_for_backward
from models import TrainingStep, pair, prepare_training, shape_of, token_former
from suite import Figure, Options, figure, run
from timing import in_turns

from tokenformer import cost

WIDTH, LAYERS, TOKENS = 256, 2, 1024  # the ratio is nearly that of one layer
CONTEXTS = [512, 1024, 2048, 4096, 8192]
TARGETS = {2048: {"at_least": 1.25}, 8192: {"at_least": 1.6, "aim": 2.0}}
STEP_TOKENS = 2048  # in a batch of shorter sequences
QUICK = (64, 2, 256), [16, 32]


def measure(options: Options) -> list[Figure]:
    """Every length, then the crossing point."""
    shape, contexts = QUICK if options.quick else ((WIDTH, LAYERS, TOKENS), CONTEXTS)
    figures, ratios = [], []
    for context in contexts:
        config = token_former(*shape, context)
        batch = 1 if options.quick else max(1, STEP_TOKENS // context)
        models = pair(config)
        steps = {name: TrainingStep(model, batch, context) for name, model in models.items()}
        kept = {name: kept_for_backward(s.forward, [*s.model.parameters(), s.ids]) for name, s in steps.items()}
        times = in_turns(steps, options.repeats, warmup=1 if context > STEP_TOKENS else 2)
        details = {"shapes": {key: shape_of(model, batch, context) for key, model in models.items()}}
        del models, steps
        ratio = times.speedup("tokenformer", over="gpt-neox")
        ratios.append(ratio.median)
        peer = cost.equal_neox(config)
        ours, theirs = (cost.training_flops_per_token(one, context) for one in (config, peer))
        at = f"n = 4d against GPT-NeoX, context {context}"
        targets = TARGETS.get(context, {})
        figures += [
            figure(f"{at}: times as fast", ratio, **targets, median_seconds=times.medians, **details),
            figure(f"{at}: FLOPs of GPT-NeoX over ours", theirs / ours, flops_per_token=[ours, theirs], **details),
            figure(
                f"{at}: memory kept for backward", kept["tokenformer"] / kept["gpt-neox"], kept_bytes=kept, **details
            ),
        ]
        if targets:
            peak = [fresh_peak_of(prepare_training, one, batch, context)[1] for one in (config, peer)]
            figures.append(figure(f"{at}: peak memory", peak[0] / peak[1], peak_bytes=peak, **details))
    return [*figures, crossing_figure(contexts, ratios)]


def crossing_point(contexts: list[int], ratios: list[float]) -> float | None:
    """The length after which the ratio stays above 1, by straight lines over the logarithm of the length.

    The shortest length if the ratio is above 1 at all of them; None if it is not at the longest.
    """
    if ratios[-1] < 1:
        return None
    points = list(zip(contexts, ratios, strict=True))
    for (short, low), (long, high) in reversed(list(itertools.pairwise(points))):
        if low < 1:
            share = (1 - low) / (high - low)
            return math.exp(math.log(short) + share * math.log(long / short))
    return float(contexts[0])


def crossing_figure(contexts: list[int], ratios: list[float]) -> Figure:
    """The crossing point in words that say what was seen."""
    at, details = crossing_point(contexts, ratios), {"contexts": contexts, "ratios": ratios}
    if at is None:
        return figure(f"n = 4d: not faster at any context up to {contexts[-1]}; the ratio there", ratios[-1], **details)
    if at == contexts[0]:
        return figure("n = 4d: faster at every context measured, from (tokens)", at, **details)
    return figure("n = 4d: faster from context (tokens)", at, **details)


if __name__ == "__main__":
    run(measure, __doc__, repeats=5)
