"""What it saves to mix only the values of the heaviest tokens of a row (docs/sizes.md has the figures).

    python benchmarks/top_k.py [--quick] [--repeats N] [--out FOLDER]

One feed-forward layer as wide as the paper's largest ladder, in inference, for a few rows at once: against all its
values, and against the product over all values with the others masked, which is the way beyond a few rows. And whole
models that generate one token after the other. Leaves: speed in terms of the layer or model with all tokens;
benchmarks/results/top_k.json.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from suite import Figure, Options, figure, run
from timing import in_turns
from torch import Tensor

from tokenformer import Pattention, TokenFormerConfig, TokenFormerForCausalLM
from tokenformer.pattention import fused

WIDTH, TOKENS, ROWS, COUNTS = 768, 24_576, (1, 4, 16), (64, 256, 1024, 4096)
QUICK = (16, 64, (1, 2), (2, 8))
BLOCKS, NEW_TOKENS = 2, 16
ALWAYS, NEVER = 0, 2**40  # what gathering is taken to cost, so that it is done or not


@torch.inference_mode()
def attend(layer: Pattention, x: Tensor, top_k: int | None, cost: int) -> None:
    """One pass through the layer."""
    layer.top_k, fused.GATHERED_COST = top_k, cost
    layer(x)


@torch.inference_mode()
def generate(model: Any, ids: Tensor, top_k: int | None) -> None:
    """A few tokens, one after the other."""
    model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, token_top_k=top_k)


def measure(options: Options) -> list[Figure]:
    """The layer for every number of rows, then the model."""
    width, tokens, rows_at_once, counts = QUICK if options.quick else (WIDTH, TOKENS, ROWS, COUNTS)
    chosen, figures = fused.GATHERED_COST, []
    layer = Pattention(width, width, tokens).eval()
    try:
        for rows in rows_at_once:
            x = torch.randn(rows, width)
            work: dict[str, Callable[[], None]] = {"all": partial(attend, layer, x, None, chosen)}
            for k in counts:
                work[f"gathered {k}"] = partial(attend, layer, x, k, ALWAYS)
                work[f"masked {k}"] = partial(attend, layer, x, k, NEVER)
            times = in_turns(work, options.repeats)
            seconds = {"median_seconds": times.medians}
            for k in counts:
                at = f"a layer of {tokens:,} tokens, {rows} rows, top {k}"
                for way in ("gathered", "masked"):
                    figures.append(figure(f"{at}, {way}: speed", times.speedup(f"{way} {k}", "all"), **seconds))
    finally:
        fused.GATHERED_COST = chosen
    return figures + of_a_model(options, width, tokens, counts)


def of_a_model(options: Options, width: int, tokens: int, counts: tuple[int, ...]) -> list[Figure]:
    """Generation with few blocks of the same size."""
    shape = {"qkv_tokens": tokens // 4, "out_tokens": tokens // 4, "ffn_tokens": tokens, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_hidden_layers": BLOCKS, "bos_token_id": None, "eos_token_id": None}
    model = TokenFormerForCausalLM(TokenFormerConfig(hidden_size=width, **heads, **shape)).eval()
    model.generation_config.pad_token_id = 0
    ids = torch.randint(0, 256, (1, 16))
    work = {"all": partial(generate, model, ids, None), **{str(k): partial(generate, model, ids, k) for k in counts}}
    times = in_turns(work, options.repeats, warmup=1)
    return [
        figure(f"one sequence is generated, top {k} of {tokens:,}: speed", times.speedup(str(k), "all")) for k in counts
    ]


if __name__ == "__main__":
    run(measure, __doc__)
