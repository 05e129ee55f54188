"""A batch whose 32 rows have 32 different token groups, against the base alone; and the same with peft's LoRA.

    python benchmarks/token_groups.py [--quick] [--repeats N] [--out FOLDER]

Groups of 16 tokens beside the FFNs of a TokenFormer, named by `adapter_names`; LoRA on all linear layers of a GPT-NeoX
of as many parameters, of the rank with which an adapter has about as many parameters as a group. Leaves: the speed of
each in terms of its base, and of one batch in terms of one row after the other; for a prompt (the cache is filled, and
the last position is scored) and for a forward pass with all scores; benchmarks/results/token_groups.json.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from models import count, pair, shape_of, token_former
from peft import LoraConfig, get_peft_model
from suite import Figure, Options, figure, run
from timing import in_turns
from torch import nn

from tokenformer import add_tokens, token_groups, use_tokens

ROWS, TOKENS, RANK = 32, 16, 2
SHAPE, LENGTH = (768, 2, 768), 64  # the width of the preset 150m, with fewer layers; a small vocabulary, to see blocks
QUICK_SHAPE, QUICK_LENGTH = (64, 1, 32), 8
PASSES = {"prompt": {"use_cache": True, "logits_to_keep": 1}, "forward pass": {"use_cache": False}}


def with_groups(model: nn.Module) -> list[str]:
    """Give a model a group for every row, as if each had learnt something, and return their names."""
    names = [f"group{i}" for i in range(ROWS)]
    for i, name in enumerate(names):
        add_tokens(model, name, TOKENS, seed=i)
    for name, parameter in model.named_parameters():
        if ".token_groups." in name and name.endswith("value_tokens"):
            nn.init.normal_(parameter, std=0.02)
    return names


def with_lora(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model in peft's wrapper with an adapter for every row, and their names."""
    names = [f"adapter{i}" for i in range(ROWS)]
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", init_lora_weights=False)
    wrapped = get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, config)
    return wrapped, names


@torch.inference_mode()
def forward(model: Any, ids: torch.Tensor, **more: Any) -> None:
    """One batch."""
    model(input_ids=ids, **more)


@torch.inference_mode()
def one_after_the_other(model: Any, ids: torch.Tensor, names: list[str], **more: Any) -> None:
    """A batch of one row for every group, which is switched on before."""
    for name, row in zip(names, ids.split(1), strict=True):
        model(input_ids=row, adapter_names=[name], **more)


def measure(options: Options) -> list[Figure]:
    """Both models with their adapters, in turns with themselves as they were."""
    shape, length = (QUICK_SHAPE, QUICK_LENGTH) if options.quick else (SHAPE, LENGTH)
    torch.manual_seed(options.seed)
    config = token_former(*shape, context=length)
    base, neox = (model.eval() for model in pair(config).values())
    torch.manual_seed(options.seed)
    ours, theirs = (model.eval() for model in pair(config).values())
    names = with_groups(ours)
    use_tokens(ours)
    lora, adapters = with_lora(theirs)
    lora.eval()
    ids = torch.randint(0, config.vocab_size, (ROWS, length))
    figures = []
    for what, how in PASSES.items():
        work: dict[str, Callable[[], None]] = {
            "base": partial(forward, base, ids, **how),
            "groups off": partial(forward, ours, ids, **how),
            "groups": partial(forward, ours, ids, adapter_names=names, **how),
            "one after the other": partial(one_after_the_other, ours, ids, names, **how),
            "gpt-neox": partial(forward, neox, ids, **how),
            "lora": partial(forward, lora, ids, adapter_names=adapters, **how),
        }
        times = in_turns(work, options.repeats)
        details = {
            "shapes": {"tokenformer": shape_of(base, ROWS, length), "gpt-neox": shape_of(neox, ROWS, length)},
            "parameters_of_a_group": token_groups(ours)[0].parameters,
            "parameters_of_an_adapter": (count(lora) - count(neox)) // ROWS,
            "median_seconds": times.medians,
            "tokens_per_second": {name: ROWS * length / seconds for name, seconds in times.medians.items()},
        }
        at = f"{what}, {ROWS} rows of {length}, {ROWS} groups of {TOKENS} tokens"
        figures += [
            figure(f"{at}: speed in terms of the base", times.speedup("groups", "base"), at_least=0.8, **details),
            figure(f"{at}: times as fast as a row at a time", times.speedup("groups", "one after the other")),
            figure(f"{at}, all off: speed in terms of the base", times.speedup("groups off", "base")),
            figure(
                f"{what}, {ROWS} rows of {length}, {ROWS} LoRAs of rank {RANK}: speed in terms of its base",
                times.speedup("lora", "gpt-neox"),
            ),
        ]
    return figures


if __name__ == "__main__":
    run(measure, __doc__)
