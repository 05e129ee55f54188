"""Which tokens a model uses: the weights of every Pattention, recorded while the model runs.

Enters: any torch model with Pattentions in it. Leaves: for every layer, by name, the weights of each of its calls.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .module import pattention_layers


@contextmanager
def record_token_weights(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Within the `with`, the weights of every Pattention of the model: by the layer's name, one tensor for each call.

        with record_token_weights(model) as weights:
            model(input_ids)
        weights["model.layers.0.ffn"][0]    # [batch, length, n]

    They are computed a second time, beside the layer's own fast form. Calls from other threads are not recorded.
    """
    weights: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks:
        for name, layer in pattention_layers(model):
            weights[name] = []
            hooks.enter_context(
                layer.register_forward_hook(partial(_record, weights[name], get_ident()), with_kwargs=True)
            )
        yield weights


def _record(weights: list[Tensor], thread: int, layer: Any, args: tuple, kwargs: dict, output: Tensor) -> None:
    if get_ident() != thread:
        return
    # Kept as they are: gradient checkpointing would compute them again, in a backward pass that records nothing.
    with saved_tensors_hooks(_unchanged, _unchanged):
        weights.append(layer.token_weights(*args, **kwargs))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
