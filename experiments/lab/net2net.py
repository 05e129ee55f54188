"""Net2Net for a GPT-NeoX: a wider model that computes the same.

`widen`: twice the width, four times the parameters. Every channel of the residual stream, every head and every unit of
the FFN is made twice. A layer that reads doubled channels gets half its weights for each of the two, plus a random part
that it adds to one and takes from the other: the sum is what it was, and the twins get different gradients. LayerNorm
sees every value twice, so mean and variance stay. The logits would double through the tied embedding, so the final norm
halves.

Heads are doubled in number instead of in size, because rotary embedding depends on a head's size.

`widen_ffn`: FFNs of any larger size, and nothing else. New units are copies of old ones, drawn at random, and the
outgoing weights of a unit are divided among its copies, unevenly, so that they get different gradients. The width can
only be doubled: LayerNorm would see channels that stand there more often than others.
"""

import copy

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import GPTNeoXForCausalLM


@torch.no_grad()
def widen(model: GPTNeoXForCausalLM, *, seed: int, noise: float) -> GPTNeoXForCausalLM:
    """The doubled model. `noise` is the size of the random parts, in units of half a weight's root mean square."""
    config = copy.deepcopy(model.config)
    config.hidden_size *= 2
    config.num_attention_heads *= 2
    config.intermediate_size *= 2
    larger = type(model)(config).train(model.training)
    generator = torch.Generator().manual_seed(seed)
    old, state = model.state_dict(), {}
    for name, new in larger.state_dict().items():
        if "embed_in" in name or "lm_head" in name:
            state[name] = old[name].repeat(1, 2)
        elif new.ndim == 2:
            # Query, key and value of a head lie together, so that all rows a second time are the heads a second time.
            state[name] = _halves(old[name], noise, generator).repeat(2, 1)
        elif new.shape != old[name].shape:
            state[name] = old[name].repeat(2) / (2 if "final_layer_norm" in name else 1)
        else:
            state[name] = old[name]
    larger.load_state_dict(state)
    return larger


@torch.no_grad()
def carry_moments(old: AdamW, model: nn.Module, new: AdamW, larger: nn.Module, *, noise: float) -> None:
    """Adam's moments of a model, for the one that `widen` made of it.

    Every twin gets half of the gradient, plus what the random part in the layers that read it makes of it, which is as
    large for a noise of 1. Only the final norm gets the whole, because the embedding reads both twins as they are.
    """
    if not old.state:  # before the first step
        return
    before = dict(model.named_parameters())
    for name, parameter in larger.named_parameters():
        state, whole = old.state[before[name]], "final_layer_norm" in name
        times = [after // length for after, length in zip(parameter.shape, before[name].shape, strict=True)]
        new.state[parameter] = {
            "step": state["step"].clone(),
            "exp_avg": state["exp_avg"].repeat(times) / (1 if whole else 2),
            "exp_avg_sq": state["exp_avg_sq"].repeat(times) * (1 if whole else (1 + noise**2) / 4),
        }


@torch.no_grad()
def widen_ffn(model: GPTNeoXForCausalLM, size: int, *, seed: int, noise: float) -> GPTNeoXForCausalLM:
    """The model with FFNs of `size` units. `noise`: in units of a unit's share of a weight's root mean square."""
    config = copy.deepcopy(model.config)
    before, config.intermediate_size = config.intermediate_size, size
    larger = type(model)(config).train(model.training)
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    for i in range(config.num_hidden_layers):
        mlp = f"gpt_neox.layers.{i}.mlp"
        drawn = torch.randint(before, (size - before,), generator=generator)
        origin = torch.cat([torch.arange(before), drawn])  # [size], the old unit that each is a copy of
        for name in (f"{mlp}.dense_h_to_4h.weight", f"{mlp}.dense_h_to_4h.bias"):
            state[name] = state[name][origin]
        state[f"{mlp}.dense_4h_to_h.weight"] = _shares(state[f"{mlp}.dense_4h_to_h.weight"], origin, noise, generator)
    larger.load_state_dict(state)
    return larger


def _shares(weight: Tensor, origin: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """[out, in] to [out, len(origin)]: the weights of every input, shared out among its copies."""
    copies = origin.bincount(minlength=weight.shape[1]).to(weight)
    scale = noise * weight.square().mean().sqrt() / copies
    parts = torch.randn(len(weight), len(origin), generator=generator).to(weight) * scale[origin]
    means = torch.zeros_like(weight).index_add_(1, origin, parts) / copies
    return (weight / copies - means)[:, origin] + parts


def _halves(weight: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """[out, in] to [out, 2 in], with the same result for an input that stands there twice."""
    scale = noise * weight.square().mean().sqrt() / 2
    part = torch.randn(weight.shape, generator=generator) * scale
    return torch.cat([weight / 2 + part, weight / 2 - part], dim=1)
