"""Greedy decoding with a cache through `generate`, against a GPT-NeoX of equal parameters.

    python benchmarks/decoding.py [--quick] [--repeats N] [--out FOLDER]

Leaves: the ratio of tokens per second, prompt included, for batches of 1 and 16: ours for inference against
transformers' GPT-NeoX as it comes, against the same GPT-NeoX after `for_inference`, which gives its linear layers the
product that ours have, and against ours as it was trained. And how far from the limit of memory bandwidth a step of
decoding is: it has to read every parameter once, and the same run measures how fast a large array is read by the
fastest of the products that are used; benchmarks/results/decoding.json.
"""

import copy
from functools import partial

import torch
from models import NO_END, count, pair, shape_of, token_former
from suite import Figure, Options, figure, run
from timing import in_turns
from torch import nn
from transformers import GenerationMixin

from tokenformer import TokenFormerConfig, for_inference
from tokenformer.pattention.inference import product

PROMPT, NEW = 32, 32
BATCHES = {1: 1.0, 16: 1.05}  # and what is wanted against GPT-NeoX
WANTED_SHARE = 0.65
READ_BYTES = 1 << 30
OURS, PEER, PEER_LIKEWISE, AS_TRAINED = (
    "tokenformer",
    "gpt-neox",
    "gpt-neox by the same products",
    "tokenformer as trained",
)


def decode(model: nn.Module, prompt: torch.Tensor, new: int) -> None:
    """`new` tokens after the prompt, by the layers that the model has; nothing ends a text early."""
    settings = {"max_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    out = GenerationMixin.generate(model, prompt, **settings)  # ours would choose other layers
    assert out.shape[1] == prompt.shape[1] + new


def read_bandwidth(size: int, repeats: int) -> float:
    """Bytes a second of products of a vector and an array much larger than the caches, the faster of two kinds."""
    matrix = torch.ones(size // (4 * 4096), 4096)
    vector = torch.ones(4096)
    times = in_turns(
        {"torch": lambda: torch.mv(matrix, vector), "ours": lambda: product(vector.view(1, -1), matrix)}, repeats
    )
    return size / min(times.medians.values())


def variants(config: TokenFormerConfig) -> dict[str, nn.Module]:
    """Ours and GPT-NeoX, each as it comes and for inference."""
    ours, peer = (model.eval() for model in pair(config).values())
    made = {AS_TRAINED: ours, PEER: peer}
    return made | {OURS: for_inference(copy.deepcopy(ours)), PEER_LIKEWISE: for_inference(copy.deepcopy(peer))}


def measure(options: Options) -> list[Figure]:
    """All models at both batch sizes."""
    config = token_former(64, 2, 64, 64) if options.quick else TokenFormerConfig.preset("150m", **NO_END)
    new = 4 if options.quick else NEW
    bandwidth = read_bandwidth(1 << 20 if options.quick else READ_BYTES, options.repeats)
    models = variants(config)
    figures = [figure("read bandwidth of this machine, GB/s", bandwidth / 1e9)]
    for batch, wanted in BATCHES.items():
        prompt = torch.randint(0, config.vocab_size, (batch, PROMPT))
        work = {name: partial(decode, model, prompt, new) for name, model in models.items()}
        work |= {f"{name}, first token": partial(decode, model, prompt, 1) for name, model in models.items()}
        with torch.no_grad():
            times = in_turns(work, options.repeats, warmup=1)
        # A step of decoding, without the prompt's.
        per_step = {name: (times.medians[name] - times.medians[f"{name}, first token"]) / (new - 1) for name in models}
        limit = {name: 4 * count(model) / bandwidth for name, model in models.items()}
        details = {
            "shapes": {name: shape_of(models[name], batch, PROMPT + new) for name in (OURS, PEER)},
            "median_seconds": times.medians,
            "seconds_per_step": per_step,
            "seconds_to_read_the_parameters": limit[OURS],
            "tokens_per_second": {name: batch * new / times.medians[name] for name in models},
        }
        at = f"decoding, batch {batch}"
        against = times.speedup(OURS, over=PEER)
        figures.append(figure(f"{at}, against GPT-NeoX: times as fast", against, at_least=wanted, **details))
        for other in (PEER_LIKEWISE, AS_TRAINED):
            figures.append(figure(f"{at}, against {other}: times as fast", times.speedup(OURS, over=other)))
        figures += [
            figure(
                f"{at}, {name}: share of the read bandwidth reached",
                limit[name] / per_step[name],
                at_least=WANTED_SHARE if (name, batch) == (OURS, 1) else None,
            )
            for name in models
        ]
    return figures


if __name__ == "__main__":
    run(measure, __doc__, repeats=5)
