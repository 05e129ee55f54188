"""Where the time of a training step and of a decoding step goes, by kind of operator, ours beside a GPT-NeoX.

    python benchmarks/where_time_goes.py [--quick] [--repeats N] [--out FOLDER]

Leaves: for each, the share of matrix products, attention between tokens, GeLU, what else Pattention does, the optimizer
and the rest, by torch's profiler, which slows small operators a little; benchmarks/results/where_time_goes.json.
"""

from collections.abc import Callable

import torch
from decoding import PROMPT, decode
from models import NO_END, TrainingStep, pair, token_former
from suite import Figure, Options, figure, run
from torch.profiler import profile

from tokenformer import TokenFormerConfig

SHAPES = [((256, 6, 256), 2, 1024), ((768, 2, 768), 2, 1024)]  # model, batch, context
QUICK_SHAPES = [((64, 1, 64), 1, 32)]
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product",),
    "GeLU": ("aten::gelu",),
    "optimizer": ("aten::_fused_adamw_",),
    "norms, sums and products in place": ("aten::linalg_vector_norm", "aten::mul", "aten::addcmul", "aten::sum"),
}


def shares(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """The share of every kind of operator in the time of all, after a warm-up."""
    work()
    with profile() as profiled:
        for _ in range(repeats):
            work()
    spent = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profiled.key_averages():
        kind = next((kind for kind, names in KINDS.items() if _is_one_of(event.key, names)), "the rest")
        spent[kind] += event.self_cpu_time_total
    return {kind: time / sum(spent.values()) for kind, time in spent.items()}


def _is_one_of(name: str, names: tuple[str, ...]) -> bool:
    exact = name in names or name.rstrip("_") in names
    return exact or (len(names) == 1 and name.startswith(names[0]))


def measure(options: Options) -> list[Figure]:
    """Training at every shape, and decoding one sequence."""
    work = {}
    for shape, batch, context in QUICK_SHAPES if options.quick else SHAPES:
        for name, model in pair(token_former(*shape, context)).items():
            work[f"training step, d {shape[0]}, {name}"] = TrainingStep(model, batch, context)
    config = token_former(64, 1, 64, 64) if options.quick else TokenFormerConfig.preset("150m", **NO_END)
    prompt = torch.randint(0, config.vocab_size, (1, PROMPT))
    for name, model in pair(config).items():
        model.eval()
        work[f"decoding, batch 1, {name}"] = lambda model=model: decode(model, prompt, 16)
    return [
        figure(f"{what}: share of {kind}", share)
        for what, call in work.items()
        for kind, share in shares(call, options.repeats).items()
    ]


if __name__ == "__main__":
    run(measure, __doc__, repeats=3)
