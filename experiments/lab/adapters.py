"""What learns beside a finished model: a group of tokens, or peft's LoRA. Or all of the model.

Enters: the finished model, and a run with an adapter. Leaves: the model with the adapter, which alone learns; it
computes what it did.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenformer import add_tokens

from .data import TrainingBlocks
from .spec import Adapter, NeoX, Run, TokenFormer

# What the layers of every role are called.
LAYERS: dict[type, dict[str, tuple[str, ...]]] = {
    TokenFormer: {"qkv": ("query", "key", "value"), "out": ("out",), "ffn": ("ffn",)},
    NeoX: {"qkv": ("query_key_value",), "out": ("dense",), "ffn": ("dense_h_to_4h", "dense_4h_to_h")},
}
VALUES = "value_tokens"
KEY_BLOCKS = 32  # of the text, whose hidden states may become keys


def with_adapter(model: nn.Module, run: Run) -> nn.Module:
    """The model with a run's adapter. Groups of tokens are called after the text."""
    adapter = run.adapter
    if adapter is None or adapter.way == "full":
        return model
    if adapter.way == "lora":
        return _with_lora(model, run, adapter)
    add_tokens(model, run.text, dict(adapter.sizes), norm=adapter.way, seed=run.seed)
    if adapter.keys == "hidden":
        _take_keys(model, run)
    return model


def adapter_shares(model: nn.Module, adapter: Adapter) -> dict[str, float]:
    """The share of the rate that every parameter has which learns and has not the whole of it."""
    if not adapter.base:
        return {}
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad and name.endswith(VALUES)}
    return {name: adapter.base / len(values) for name, values in learning.items()}


def _with_lora(model: nn.Module, run: Run, adapter: Adapter) -> nn.Module:
    """peft's LoRA on linear layers, or on keys and values of Pattentions; scaled by 2, as is usual."""
    from peft import LoraConfig, get_peft_model  # half a second, and most experiments do without

    layers = LAYERS[type(run.model)]
    ranks = {name: rank for role, rank in adapter.sizes for name in layers[role]}
    config = LoraConfig(
        target_modules=[*ranks],
        rank_pattern=ranks,
        alpha_pattern={name: 2 * rank for name, rank in ranks.items()},
    )
    torch.manual_seed(run.seed)
    return get_peft_model(model, config)


@torch.no_grad()
def _take_keys(model: Any, run: Run) -> None:
    """Give a group keys that are hidden states of its layer on blocks of the text, as long as random keys are: 1."""
    ids = TrainingBlocks(run.text, run.context, run.seed).batch(0, KEY_BLOCKS)
    end = f".token_groups.{run.text}.key_tokens"
    keys = {name.removesuffix(end): p for name, p in model.named_parameters() if name.endswith(end)}
    generator = torch.Generator().manual_seed(run.seed)

    def take(tokens: Tensor) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            hidden = args[0].flatten(0, -2)  # [rows, d_in]
            drawn = torch.randperm(len(hidden), generator=generator)[: len(tokens)]
            tokens.copy_(F.normalize(hidden[drawn], dim=-1))

        return hook

    hooks = [model.get_submodule(layer).register_forward_pre_hook(take(tokens)) for layer, tokens in keys.items()]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
