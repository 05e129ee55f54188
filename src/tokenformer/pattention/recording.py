"""What passes through layers while a model runs: the weights that tokens get, or whatever else is asked of a call.

Enters: any torch model with Pattentions in it. Leaves: for every layer, by name, the weights of each of its calls.
"""

from collections.abc import Callable, Iterable, Iterator
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
    layers = dict(pattention_layers(model))
    weights: dict[str, list[Tensor]] = {name: [] for name in layers}

    def record(name: str, x: Tensor) -> None:
        weights[name].append(layers[name].token_weights(x))

    with each_call(layers.items(), record):
        yield weights


@contextmanager
def each_call(layers: Iterable[tuple[str, nn.Module]], note: Callable[[str, Tensor], Any]) -> Iterator[None]:
    """Within the `with`, `note` gets a layer's name and its rows [..., d_in] whenever it has been called.

    Calls from other threads are left out.
    """
    with ExitStack() as hooks:
        for name, layer in layers:
            hook = partial(_noted, note, name, get_ident())
            hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
        yield


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer is called with, by place or by name."""
    return args[0] if args else next(iter(kwargs.values()))


def _noted(
    note: Callable[[str, Tensor], Any], name: str, thread: int, layer: Any, args: tuple, kwargs: dict, output: Any
) -> None:
    if get_ident() != thread:
        return
    # Kept as they are: gradient checkpointing would compute them again, in a backward pass that records nothing.
    with saved_tensors_hooks(_unchanged, _unchanged):
        note(name, first_input(args, kwargs))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
