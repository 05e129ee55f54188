"""Net2Net for a GPT-NeoX: twice the width, four times the parameters, and the same function.

Every channel of the residual stream, every head and every unit of the FFN is made twice. A layer that reads doubled
channels gets half its weights for each of the two, plus a random part that it adds to one and takes from the other: the
sum is what it was, and the twins get different gradients. LayerNorm sees every value twice, so mean and variance stay.
The logits would double through the tied embedding, so the final norm halves.

Heads are doubled in number instead of in size, because rotary embedding depends on a head's size.
"""

import copy

import torch
from torch import Tensor
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
        if new.ndim == 2 and len(new) == config.vocab_size:
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


def _halves(weight: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """[out, in] to [out, 2 in], with the same result for an input that stands there twice."""
    scale = noise * weight.square().mean().sqrt() / 2
    part = torch.randn(weight.shape, generator=generator) * scale
    return torch.cat([weight / 2 + part, weight / 2 - part], dim=1)
