"""A training step of the language model against a GPT-NeoX of equal parameters, where a projection has d tokens.

    python benchmarks/training_step.py [--quick] [--repeats N] [--out FOLDER]

A step is forward with labels, backward, fused AdamW. Leaves: ratios of tokens per second, of the peak of resident
memory (weights, gradients, optimizer state and activations, each model in a fresh process), and of the memory kept
for the backward pass; benchmarks/results/training_step.json. With a large vocabulary, also with `chunked_loss`.
"""

from memory import fresh_peak_of, kept_for_backward, peak_of
from models import NO_END, TrainingStep, pair, prepare_training, shape_of, token_former
from suite import Figure, Options, figure, run
from timing import in_turns

from tokenformer import TokenFormerConfig
from tokenformer.cost import equal_neox

OURS, CHUNKED, THEIRS = "tokenformer", "tokenformer, chunked loss", "gpt-neox"
LARGE_VOCABULARY = 10_000


def shapes(quick: bool) -> list[tuple[str, TokenFormerConfig, int, int]]:
    """Name, configuration, batch and context."""
    if quick:
        return [("tiny", token_former(64, 2, 64, 32), 2, 32)]
    return [
        ("d 256, 6 layers, n 256", token_former(256, 6, 256, 1024), 2, 1024),
        ("d 768, 2 layers, n 768", token_former(768, 2, 768, 1024), 2, 1024),
        ("preset 150m", TokenFormerConfig.preset("150m", **NO_END), 1, 1024),
    ]


def measure(options: Options) -> list[Figure]:
    """Time, peak and kept memory at every shape."""
    figures = []
    for name, config, batch, context in shapes(options.quick):
        large = options.quick or config.vocab_size > LARGE_VOCABULARY
        models = pair(config)
        steps = {model_name: TrainingStep(model, batch, context) for model_name, model in models.items()}
        if large:
            steps[CHUNKED] = TrainingStep(models[OURS], batch, context, chunked_loss=True)
            steps[CHUNKED].optimizer = steps[OURS].optimizer  # one model, one state
        kept = {
            step_name: kept_for_backward(step.forward, [*step.model.parameters(), step.ids])
            for step_name, step in steps.items()
        }
        # The large model's steps take ten seconds each.
        times = in_turns(steps, min(options.repeats, 4) if large else options.repeats, warmup=1 if large else 2)
        details = {"shapes": {key: shape_of(model, batch, context) for key, model in models.items()}}
        del models, steps  # before other processes need the memory
        peak = {}
        for key in times.seconds:
            asked = (equal_neox(config) if key == THEIRS else config, batch, context, key == CHUNKED)
            peak[key] = (peak_of if options.quick else fresh_peak_of)(prepare_training, *asked)[1]
        tokens_per_second = {key: batch * context / median for key, median in times.medians.items()}
        speed = {**details, "median_seconds": times.medians, "tokens_per_second": tokens_per_second}
        memory = {**details, "peak_bytes": peak, "kept_bytes": kept}
        for key in [OURS, CHUNKED] if large else [OURS]:
            loss = ", chunked loss" if key == CHUNKED else ""
            at = f"training step against GPT-NeoX, {name}{loss}"
            # The targets are for the ordinary loss, which both have.
            speed_target, memory_target = (
                ({}, {}) if key == CHUNKED else ({"at_least": 1.0, "aim": 1.1}, {"at_most": 1.0})
            )
            figures += [
                figure(f"{at}: times as fast", times.speedup(key, over=THEIRS), **speed_target, **speed),
                figure(f"{at}: peak memory", peak[key] / peak[THEIRS], **memory_target, **memory),
                figure(f"{at}: memory kept for backward", kept[key] / kept[THEIRS], **memory),
            ]
    return figures


if __name__ == "__main__":
    run(measure, __doc__)
