"""A trained model with tokens of eight and four bits, and an output layer of eight: its loss and its size.

    make demo; python benchmarks/quantisation.py [--quick] [--out FOLDER]

Leaves: bits per byte of the demo's last stage on its held-out text, with many rows at a time and with four, where
products of int4 are rounded to bf16; the size of the tokens and of the whole model, also of the preset 150m;
benchmarks/results/quantisation.json. Without the demo's run in runs/demo there are only the sizes of the preset.
"""

import copy
import math
from collections.abc import Iterator

import torch
from models import token_former
from suite import ROOT, Figure, Options, figure, run
from torch import Tensor, nn
from torch.nn import functional as F

from tokenformer import TokenFormerConfig, TokenFormerForCausalLM, quantize
from tokenformer.quantisation.quantise_folder import token_bytes
from tokenformer.training import load_recipe

DEMO = ROOT / "runs" / "demo" / "stage-3" / "model"
RECIPE = ROOT / "recipes" / "demo.yaml"
BLOCKS, BLOCKS_BY_TOKEN, LENGTH_BY_TOKEN = 64, 4, 64
MOST_LOSS = {"int8": 0.5, "int4": 3.0}  # per cent
MOST_SIZE = {"int8": 0.28, "int4": 0.17}
# By name: to how many bits, and whether the output layer is quantised, too.
WAYS = {"int8": ("int8", False), "int8, output layer too": ("int8", True), "int4": ("int4", False)}


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
    few = blocks[:BLOCKS_BY_TOKEN, :LENGTH_BY_TOKEN]
    before = bits_per_byte(model, blocks), bits_per_byte_by_token(model, few)
    sizes = token_bytes(model), model.get_memory_footprint()
    for way, (to, output_layer) in WAYS.items():
        quantised = quantize(copy.deepcopy(model), to, output_layer=output_layer)
        after = bits_per_byte(quantised, blocks), bits_per_byte_by_token(quantised, few)
        for name, old, new in zip(("", ", one token at a time"), before, after, strict=True):
            rise = 100 * (new / old - 1)
            details = {"bits_per_byte": {"fp32": old, way: new}}
            yield figure(f"demo, {way}{name}: more bits per byte, %", rise, at_most=MOST_LOSS[to], **details)
        if output_layer:  # whose file is as large
            continue
        ratio = token_bytes(quantised) / sizes[0]
        yield figure(f"demo, {to}: size of the tokens, of fp32", ratio, at_most=MOST_SIZE[to])
        yield figure(f"demo, {to}: size of the model, of fp32", quantised.get_memory_footprint() / sizes[1])


def measure(options: Options) -> list[Figure]:
    """The demo's last stage, then the preset 150m."""
    figures: list[Figure] = []
    if options.quick:
        model = TokenFormerForCausalLM(token_former(32, 1, 32, 64)).eval()
        figures += accuracy(model, torch.randint(0, 256, (4, 16)))
    elif DEMO.exists():
        figures += accuracy(TokenFormerForCausalLM.from_pretrained(DEMO).eval(), held_out())
    config = token_former(64, 2, 64, 64) if options.quick else TokenFormerConfig.preset("150m")
    with torch.device("meta"):
        model = TokenFormerForCausalLM(config)
    for to in ("int8", "int4"):
        size = quantize(copy.deepcopy(model), to).get_memory_footprint() / model.get_memory_footprint()
        figures.append(figure(f"150m, {to}: size of the model, of fp32", size))
    return figures


if __name__ == "__main__":
    run(measure, __doc__)
