"""Whether a compiled step of decoding over a static cache pays on a CPU, in fp32 and with integers.

    python benchmarks/compiled_decoding.py [--quick] [--repeats N] [--out FOLDER]

One sequence, greedy, by one loop for all: a prompt, then one token at a time. Ours for inference and quantised, as they
are, over a cache that grows; and, each step one graph of torch.compile over a static cache with the weights frozen into
it, ours in fp32, a GPT-NeoX of equal parameters, and the same quantised by torchao in two ways, if that is installed.
Leaves: ratios of their speeds, and the seconds that the first compiled step took;
benchmarks/results/compiled_decoding.json.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from decoding import OURS
from models import NO_END, pair, shape_of, token_former
from quantised_decoding import by_torchao
from suite import Figure, Options, figure, run
from timing import in_turns, seconds
from torch import Tensor, nn
from torch._inductor import config as inductor
from transformers import DynamicCache, StaticCache

from tokenformer import TokenFormerConfig, for_inference, pattention_layers, quantize

PROMPT, NEW = 8, 24
INT8 = "int8, output layer too"


class Loop:
    """Greedy decoding of one sequence by a model's own step, or by a compiled one over a static cache."""

    def __init__(self, model: Any, compiled: bool) -> None:
        self.model, self.compiled = model, compiled
        self.step: Callable[..., Any] = torch.compile(model.forward, dynamic=False) if compiled else model
        self.cache = StaticCache(config=model.config, max_cache_len=PROMPT + NEW) if compiled else None

    @torch.no_grad()
    def __call__(self, prompt: Tensor, new: int) -> Tensor:
        """The tokens that come."""
        if self.cache is None:
            cache: Any = DynamicCache(config=self.model.config)
        else:
            cache = self.cache
            cache.reset()
        out = self.model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens = [out.logits[:, -1].argmax(-1, keepdim=True)]
        for position in range(prompt.shape[1], prompt.shape[1] + new - 1):
            out = self.step(tokens[-1], past_key_values=cache, position_ids=torch.tensor([[position]]), use_cache=True)
            tokens.append(out.logits[:, -1].argmax(-1, keepdim=True))
        return torch.cat(tokens, dim=1)


def plain(model: nn.Module) -> nn.Module:
    """In plain torch, which compilers fuse: the operator of the fast form they would call as it is."""
    for _, layer in pattention_layers(model):
        layer.form = "reference"
    return model


def measure(options: Options) -> list[Figure]:
    """All of them in turns."""
    inductor.freezing = True
    config = token_former(64, 2, 64, 64) if options.quick else TokenFormerConfig.preset("150m", **NO_END)
    new = 4 if options.quick else NEW
    ours, peer = (model.eval() for model in pair(config).values())
    eager = {
        OURS: for_inference(copy.deepcopy(ours)),
        INT8: for_inference(quantize(copy.deepcopy(ours), output_layer=True)),
    }
    compiled = {f"{OURS}, compiled": plain(ours), "gpt-neox, compiled": peer}
    compiled |= {f"{name}, compiled": model for name, model in by_torchao(peer).items()}
    loops = {name: Loop(model, False) for name, model in eager.items()}
    loops |= {name: Loop(model, True) for name, model in compiled.items()}
    prompt = torch.randint(0, config.vocab_size, (1, PROMPT))
    first = {name: seconds(partial(loop, prompt, 2)) for name, loop in loops.items()}
    times = in_turns({name: partial(loop, prompt, new) for name, loop in loops.items()}, options.repeats, warmup=1)
    details = {"median_seconds": times.medians, "first_seconds": first, "shape": shape_of(ours, 1, PROMPT + new)}
    figures = [figure(f"{name}: seconds until the second token of the first text", first[name]) for name in compiled]
    for name in loops:
        for over in eager:
            if name != over:
                ratio = times.speedup(over, over=name)
                figures.append(figure(f"decoding, batch 1, {over}: times as fast as {name}", ratio, **details))
    return figures


if __name__ == "__main__":
    run(measure, __doc__, repeats=5)
