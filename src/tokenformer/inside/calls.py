"""What tokens do in one call of a layer: their weights in every row, apart for the layer and for each group beside it.

Enters: places, and the rows that a layer is called with. Leaves: of each place, weights [..., n] and values [n, d_out];
their products, and the bias, add up to the layer's output. An ablation that is on is seen as the layer sees it: the
tokens that it took away have no weight.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..pattention import Pattention
from ..pattention.groups import groups_of
from ..pattention.recording import each_call
from .places import GROUPS, LINEARS, Place

_INSIDE: list[None] = []  # one for every `with` that is running
_STANCES: list[Any] = []


class Call(NamedTuple):
    """The tokens of one place in one call."""

    weights: Tensor  # [..., n], in fp32 or wider
    values: Tensor  # [n, d_out]


@contextmanager
def watching(places: Mapping[str, Place], note: Callable[[str, Call], Any]) -> Iterator[None]:
    """Within the `with`, `note` gets what the tokens of every place do, in every call of their layers."""
    layers = {place.layer_name: place.layer for place in places.values()}

    def read(name: str, x: Tensor) -> None:
        for full_name, call in tokens_in_call(name, layers[name], x).items():
            if full_name in places:
                note(full_name, call)

    with running_eagerly(), each_call(layers.items(), read):
        yield


def tokens_in_call(name: str, layer: Any, x: Tensor) -> dict[str, Call]:
    """What the tokens of a layer, and of the groups beside it that are on, do with rows x [..., d_in]."""
    found: dict[str, Call] = {}
    groups = groups_of(layer)
    if isinstance(layer, Pattention):
        weights, values = layer.token_weights(x), layer._tokens(x).values
        shared = [] if groups is None else groups.chosen("shared")
        sizes = [layer.num_tokens, *(groups[each].num_tokens for each in shared)] if groups else [layer.num_tokens]
        names = [name, *(f"{name}{GROUPS}{each}" for each in shared)]
        found |= dict(zip(names, map(Call, weights.split(sizes, dim=-1), values.split(sizes)), strict=True))
    elif isinstance(layer, LINEARS):
        found[name] = Call(x, Place(name, layer).values)
    if groups is not None:
        found |= {f"{name}{GROUPS}{each}": Call(*call) for each, call in groups.token_weights(x).items()}
    return found


@contextmanager
def running_eagerly() -> Iterator[None]:
    """Within the `with`, what torch.compile has compiled runs uncompiled, so that nothing is compiled anew.

    Those who came in need not leave in turn.
    """
    if not _INSIDE and "torch._dynamo" in sys.modules:  # otherwise nothing was compiled, and importing it takes seconds
        _STANCES.append(torch.compiler.set_stance("force_eager"))
    _INSIDE.append(None)
    try:
        yield
    finally:
        _INSIDE.pop()
        while not _INSIDE and _STANCES:
            _STANCES.pop().__exit__(None, None, None)
