"""An adopted GPT-NeoX against the host that it was: what the tokens that make it exact cost.

    python benchmarks/adoption.py [--quick] [--repeats N] [--out FOLDER]

Leaves: for the FFN alone and for FFN and attention, with either form of ballast: parameters, memory kept for backward,
and times of a training step and of a forward pass, each over the host's; benchmarks/results/adoption.json.
"""

import copy
from collections.abc import Callable

import torch
from memory import kept_for_backward
from models import NO_END, TrainingStep, build, count, shape_of
from suite import Figure, Options, figure, run
from timing import Ratio, in_turns
from torch import nn
from transformers import GPTNeoXConfig

from tokenformer import adopt

SHAPES = [((256, 4), 2, 512), ((768, 1), 1, 512)]  # width and layers, batch, context
QUICK_SHAPES = [((32, 1), 1, 16)]
REQUESTS = {
    f"{' and '.join(parts)}, {ballast}": (parts, ballast)
    for parts in (("ffn",), ("ffn", "qkv"))
    for ballast in ("spread", "single")
}


def host(width: int, layers: int, context: int) -> nn.Module:
    """A GPT-NeoX with heads of 64 and an FFN four times as wide."""
    shape = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
    heads = max(1, width // 64)
    config = GPTNeoXConfig(
        vocab_size=256, **shape, num_attention_heads=heads, max_position_embeddings=context, **NO_END
    )
    config._attn_implementation = "sdpa"
    return build(config)


def forward(model: nn.Module, ids: torch.Tensor) -> Callable[[], object]:
    """A forward pass without gradients."""

    def call() -> object:
        with torch.no_grad():
            return model(ids, use_cache=False)

    return call


def times_the_hosts(ratio: Ratio) -> Ratio:
    """How many times as long, from how many times as fast."""
    return Ratio(1 / ratio.median, 1 / ratio.upper, 1 / ratio.lower)


def measure(options: Options) -> list[Figure]:
    """Host and adopted models in turns, at every shape."""
    figures = []
    for (width, layers), batch, context in QUICK_SHAPES if options.quick else SHAPES:
        torch.manual_seed(options.seed)
        models = {"host": host(width, layers, context)}
        for name, (parts, ballast) in REQUESTS.items():
            models[name] = adopt(copy.deepcopy(models["host"]), parts, ballast=ballast)
        steps = {name: TrainingStep(model, batch, context) for name, model in models.items()}
        kept = {
            name: kept_for_backward(step.forward, [*models[name].parameters(), step.ids])
            for name, step in steps.items()
        }
        training = in_turns(steps, options.repeats)
        inference = in_turns({n: forward(m.eval(), steps[n].ids) for n, m in models.items()}, options.repeats)
        for name in REQUESTS:
            at = f"adopted GPT-NeoX, d {width}, {name}"
            details = {"shape": shape_of(models[name], batch, context), "host_parameters": count(models["host"])}
            over = {"training step": training, "forward pass": inference}
            figures += [
                figure(f"{at}: parameters over the host's", count(models[name]) / count(models["host"]), **details),
                figure(
                    f"{at}: share of the host's memory kept for backward", kept[name] / kept["host"], kept_bytes=kept
                ),
            ]
            figures += [
                figure(
                    f"{at}: time of a {what} over the host's",
                    times_the_hosts(times.speedup(name, over="host")),
                    median_seconds=times.medians,
                )
                for what, times in over.items()
            ]
    return figures


if __name__ == "__main__":
    run(measure, __doc__, repeats=7)
