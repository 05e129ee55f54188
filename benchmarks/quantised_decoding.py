"""Greedy decoding with tokens of eight and four bits, against fp32 and against a GPT-NeoX that torchao quantised.

    python benchmarks/quantised_decoding.py [--quick] [--repeats N] [--out FOLDER]

Leaves: tokens per second of `generate` with the preset 150m, for batches of 1 and 16, as ratios to the same model in
fp32, for inference as these are and as trained, and to a GPT-NeoX of equal parameters, as it is, for inference, and
quantised by torchao if that is installed; nothing is compiled, which compiled_decoding.py does;
benchmarks/results/quantised_decoding.json.
"""

import copy
from functools import partial
from importlib.util import find_spec

import torch
from decoding import AS_TRAINED, OURS, PEER, PEER_LIKEWISE, decode, variants
from models import NO_END, shape_of, token_former
from suite import Figure, Options, figure, run
from timing import in_turns
from torch import nn

from tokenformer import TokenFormerConfig, for_inference, quantize

PROMPT, NEW = 8, 16
BATCHES = (1, 16)
# What is quantised, to how many bits, and whether the output layer is, too.
QUANTISED = {"int8": ("int8", False), "int8, output layer too": ("int8", True), "int4": ("int4", False)}
AIM, AIMED_AT = 1.8, ("int8, output layer too", 1)


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
    """All models at both batch sizes."""
    figures: list[Figure] = []
    config = token_former(64, 2, 64, 64) if options.quick else TokenFormerConfig.preset("150m", **NO_END)
    new = 4 if options.quick else NEW
    models = variants(config)
    ours, others = models[AS_TRAINED], by_torchao(models[PEER])
    for name, (to, output_layer) in QUANTISED.items():
        models[name] = for_inference(quantize(copy.deepcopy(ours), to, output_layer=output_layer))
    models |= others
    for batch in BATCHES:
        prompt = torch.randint(0, config.vocab_size, (batch, PROMPT))
        work = {name: partial(decode, model, prompt, new) for name, model in models.items()}
        times = in_turns(work, options.repeats, warmup=1)
        details = {"median_seconds": times.medians, "shape": shape_of(ours, batch, PROMPT + new)}
        for to in QUANTISED:
            at_least = AIM if (to, batch) == AIMED_AT else None
            what = f"decoding, batch {batch}, {to}: times as fast as"
            speedup = times.speedup(to, over=OURS)
            figures.append(figure(f"{what} fp32", speedup, at_least=at_least, **details))
            for name in (AS_TRAINED, PEER, PEER_LIKEWISE, *others):
                figures.append(figure(f"{what} {name}", times.speedup(to, over=name), **details))
    return figures


if __name__ == "__main__":
    run(measure, __doc__, repeats=5)
