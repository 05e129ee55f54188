"""Models with tokens of eight and four bits: loss and size of a trained one, and how fast a larger one decodes.

    make demo; python benchmarks/quantisation.py [--quick] [--repeats N] [--out FOLDER]

Leaves: bits per byte on the demo's held-out text, with many rows at a time and with four, where the products are
rounded to bf16; the size of the tokens and of the whole model; tokens per second of `generate` against the same model
in fp32, and against a GPT-NeoX of equal parameters, also quantised by torchao if it is installed, without compiling
either; benchmarks/results/quantisation.json. Without the demo's run in runs/demo there are no figures of loss.
"""

import copy
import math
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import torch
from decoding import decode
from models import NO_END, pair, shape_of, token_former
from suite import ROOT, Figure, Options, figure, run
from timing import in_turns
from torch import Tensor, nn
from torch.nn import functional as F

from tokenformer import TokenFormerConfig, TokenFormerForCausalLM, quantize
from tokenformer.quantisation.quantise_folder import token_bytes
from tokenformer.training import load_recipe

DEMO = ROOT / "runs" / "demo" / "stage-3" / "model"
RECIPE = ROOT / "recipes" / "demo.yaml"
BLOCKS, BLOCKS_BY_TOKEN = 64, 4
PROMPT, NEW = 32, 32
BATCHES = (1, 16)
MOST_LOSS = {"int8": 0.5, "int4": 3.0}  # per cent
MOST_SIZE = {"int8": 0.28, "int4": 0.17}


def held_out() -> Tensor:
    """The blocks on which the demo validates, [blocks, length]."""
    data = load_recipe(RECIPE).data.prepare()
    found = data.held_out(BLOCKS)
    return torch.stack([torch.as_tensor(found[i]["input_ids"]) for i in range(len(found))])


@torch.no_grad()
def bits_per_byte(model: nn.Module, blocks: Tensor) -> float:
    """Of byte-level blocks, many rows at a time."""
    losses = [model(input_ids=some, labels=some).loss.item() * len(some) for some in blocks.split(16)]
    return sum(losses) / len(blocks) / math.log(2)


@torch.no_grad()
def bits_per_byte_by_token(model: nn.Module, blocks: Tensor) -> float:
    """One token of every block at a time, with a cache, as a text is generated."""
    cache, total = None, 0.0
    for i in range(blocks.shape[1] - 1):
        out = model(input_ids=blocks[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        total += F.cross_entropy(out.logits[:, -1], blocks[:, i + 1]).item()
    return total / (blocks.shape[1] - 1) / math.log(2)


def accuracy(model: nn.Module, blocks: Tensor) -> Iterator[Figure]:
    """What quantising costs in loss, and saves in size."""
    few = blocks[:BLOCKS_BY_TOKEN]
    before = bits_per_byte(model, blocks), bits_per_byte_by_token(model, few)
    sizes = token_bytes(model), model.get_memory_footprint()
    for to in ("int8", "int4"):
        quantised = quantize(copy.deepcopy(model), to)
        after = bits_per_byte(quantised, blocks), bits_per_byte_by_token(quantised, few)
        for name, old, new in zip(("", ", one token at a time"), before, after, strict=True):
            rise = 100 * (new / old - 1)
            details = {"bits_per_byte": {"fp32": old, to: new}}
            yield figure(f"demo, {to}{name}: more bits per byte, %", rise, at_most=MOST_LOSS[to], **details)
        ratio = token_bytes(quantised) / sizes[0]
        yield figure(f"demo, {to}: size of the tokens, of fp32", ratio, at_most=MOST_SIZE[to])
        yield figure(f"demo, {to}: size of the model, of fp32", quantised.get_memory_footprint() / sizes[1])


def by_torchao(model: nn.Module) -> dict[str, nn.Module]:
    """A model quantised by torchao in two ways."""
    if find_spec("torchao") is None:
        return {}
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    found = {}
    for name, config in (
        ("weights", Int8WeightOnlyConfig()),
        ("weights and activations", Int8DynamicActivationInt8WeightConfig()),
    ):
        found[f"gpt-neox, torchao's int8 {name}"] = copy.deepcopy(model)
        quantize_(found[f"gpt-neox, torchao's int8 {name}"], config)
    return found


def measure(options: Options) -> list[Figure]:
    """Loss and size of the demo's last stage, then the speed of the preset 150m."""
    figures: list[Figure] = []
    if options.quick:
        model = TokenFormerForCausalLM(token_former(32, 1, 32, 64)).eval()
        figures += accuracy(model, torch.randint(0, 256, (4, 16)))
    elif DEMO.exists():
        figures += accuracy(TokenFormerForCausalLM.from_pretrained(DEMO).eval(), held_out())
    config = token_former(64, 2, 64, 64) if options.quick else TokenFormerConfig.preset("150m", **NO_END)
    new = 4 if options.quick else NEW
    models = {name: model.eval() for name, model in pair(config).items()}
    ours, sizes = models["tokenformer"], {}
    for to in ("int8", "int4"):
        models[to] = quantize(copy.deepcopy(ours), to)
        sizes[to] = models[to].get_memory_footprint() / ours.get_memory_footprint()
        figures.append(figure(f"150m, {to}: size of the model, of fp32", sizes[to]))
    others = by_torchao(models["gpt-neox"])
    models |= others
    for batch in BATCHES:
        prompt = torch.randint(0, config.vocab_size, (batch, PROMPT))
        work = {name: partial(decode, model, prompt, new) for name, model in models.items()}
        times = in_turns(work, options.repeats, warmup=1)
        details = {"median_seconds": times.medians, "shape": shape_of(ours, batch, PROMPT + new)}
        for to in ("int8", "int4"):
            at_least = 1.8 if (to, batch) == ("int8", 1) else None
            what = f"decoding, batch {batch}, {to}: times as fast as"
            speedup = times.speedup(to, over="tokenformer")
            figures.append(figure(f"{what} fp32", speedup, at_least=at_least, **details))
            for name in ("gpt-neox", *others):
                figures.append(figure(f"{what} {name}", times.speedup(to, over=name), **details))
    return figures


if __name__ == "__main__":
    run(measure, __doc__, repeats=5)
