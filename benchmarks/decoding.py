"""Greedy decoding with a cache through `generate`, against a GPT-NeoX of equal parameters.

    python benchmarks/decoding.py [--quick] [--repeats N] [--out FOLDER]

Leaves: the ratio of tokens per second, prompt included, for batches of 1 and 16; and how far from the limit of memory
bandwidth a step of decoding is: it has to read every parameter once, and the same run measures how fast a large array
is read; benchmarks/results/decoding.json.
"""

import statistics
from functools import partial

import torch
from models import NO_END, count, pair, shape_of, token_former
from suite import Figure, Options, figure, run
from timing import in_turns, seconds
from torch import nn

from tokenformer import TokenFormerConfig

PROMPT, NEW = 32, 64
BATCHES = (1, 16)
READ_BYTES = 1 << 30


def decode(model: nn.Module, prompt: torch.Tensor, new: int) -> None:
    """`new` tokens after the prompt; nothing ends a text early."""
    out = model.generate(prompt, max_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0)
    assert out.shape[1] == prompt.shape[1] + new


def read_bandwidth(size: int, repeats: int) -> float:
    """Bytes a second of a matrix-vector product over an array much larger than the caches."""
    matrix = torch.ones(size // (4 * 4096), 4096)
    vector, out = torch.ones(4096), torch.empty(matrix.shape[0])
    torch.mv(matrix, vector, out=out)
    return size / statistics.median(seconds(lambda: torch.mv(matrix, vector, out=out)) for _ in range(repeats))


def measure(options: Options) -> list[Figure]:
    """Both models at both batch sizes."""
    config = token_former(64, 2, 64, 64) if options.quick else TokenFormerConfig.preset("150m", **NO_END)
    new = 4 if options.quick else NEW
    bandwidth = read_bandwidth(1 << 20 if options.quick else READ_BYTES, options.repeats)
    models = {name: model.eval() for name, model in pair(config).items()}
    figures = [figure("read bandwidth of this machine, GB/s", bandwidth / 1e9)]
    for batch in BATCHES:
        prompt = torch.randint(0, config.vocab_size, (batch, PROMPT))
        work = {name: partial(decode, model, prompt, new) for name, model in models.items()}
        work |= {f"{name}, first token": partial(decode, model, prompt, 1) for name, model in models.items()}
        times = in_turns(work, options.repeats, warmup=1)
        # A step of decoding, without the prompt's.
        per_step = {name: (times.medians[name] - times.medians[f"{name}, first token"]) / (new - 1) for name in models}
        limit = {name: 4 * count(model) / bandwidth for name, model in models.items()}
        details = {
            "shapes": {name: shape_of(model, batch, PROMPT + new) for name, model in models.items()},
            "median_seconds": times.medians,
            "seconds_per_step": per_step,
            "seconds_to_read_the_parameters": limit,
        }
        at = f"decoding, batch {batch}"
        figures.append(
            figure(
                f"{at}, against GPT-NeoX: times as fast",
                times.speedup("tokenformer", over="gpt-neox"),
                at_least=1.0,
                aim=1.2,
                tokens_per_second={name: batch * new / times.medians[name] for name in models},
                **details,
            )
        )
        figures += [
            figure(f"{at}, {name}: share of the read bandwidth reached", limit[name] / per_step[name], **details)
            for name in models
        ]
    return figures


if __name__ == "__main__":
    run(measure, __doc__, repeats=5)
