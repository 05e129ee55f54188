"""watch(): what the tokens of a model do while it runs.

    with tokenformer.watch(model, layers=["*.ffn"]) as seen:
        model(**inputs)
    seen["layers.3.ffn"].top(5)

Enters: a model, and which of its layers. Leaves: for each the weight of every token in every row, and what the tokens
added to the output. They are computed beside the layer's fast form, which runs as ever; nothing is kept for backward.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import BadRequestError, did_you_mean
from .calls import Call, watching
from .places import Layers, Place, check_tokens, find_places, the_one

ORDERS = ("contribution", "weight")


class Top(NamedTuple):
    """The tokens that do most in every row, the first does most: three tensors of [..., k]."""

    tokens: Tensor
    weights: Tensor
    norms: Tensor  # |weight| times the length of the value


class SeenLayer:
    """What the tokens of one layer, or of one group beside it, did in the calls that were watched.

    Rows of all calls are laid end to end along the positions, as those of a prompt and of the tokens that `generate`
    appends to it, one call each.

    Attributes:
        place: the layer, and which of its tokens.
        calls: the weights of every call, [..., n].
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.calls: list[Tensor] = []
        self._values: list[Tensor] = []

    def add(self, call: Call) -> None:
        """Take note of a call."""
        self.calls.append(call.weights.detach())
        self._values.append(call.values.detach())

    @property
    def name(self) -> str:
        """The full name in the model."""
        return self.place.name

    @property
    def weights(self) -> Tensor:
        """The weight of every token in every row: [batch, length, n]."""
        return self._joined(self.calls)

    @property
    def norms(self) -> Tensor:
        """How much every token added to the output: |weight| times the length of its value, [batch, length, n]."""
        pairs = zip(self.calls, self._values, strict=True)
        return self._joined([weights.abs() * values.to(weights.dtype).norm(dim=1) for weights, values in pairs])

    @property
    def values(self) -> Tensor:
        """The values [n, d_out], as they were in the last call."""
        self._check_called()
        return self._values[-1]

    def top(self, k: int = 10, *, by: str = "contribution") -> Top:
        """The tokens that do most in every row, by what they add or by their weight regardless of sign."""
        if by not in ORDERS:
            raise BadRequestError(f"top: by={by!r} is not known; {did_you_mean(by, ORDERS)}")
        weights, norms = self.weights, self.norms
        chosen = (norms if by == "contribution" else weights.abs()).topk(min(k, weights.shape[-1]), dim=-1).indices
        return Top(chosen, weights.gather(-1, chosen), norms.gather(-1, chosen))

    def contributions(self, *tokens: int) -> Tensor:
        """What these tokens added to the output, all of them if none is named: [batch, length, tokens, d_out]."""
        n = self.place.num_tokens
        chosen = check_tokens(self.place, tokens, "contributions") or list(range(n))
        pairs = zip(self.calls, self._values, strict=True)
        return self._joined([w[..., chosen, None] * v[chosen].to(w.dtype) for w, v in pairs], position=-3)

    def total(self) -> Tensor:
        """What all these tokens added to the output, and the layer's bias if they are its own: [batch, length, d_out].

        With the totals of the groups beside the layer it is the layer's output.
        """
        bias = self.place.bias
        pairs = zip(self.calls, self._values, strict=True)
        return self._joined([w @ v.to(w.dtype) + (0 if bias is None else bias) for w, v in pairs])

    def _joined(self, calls: list[Tensor], position: int = -2) -> Tensor:
        self._check_called()
        if len(calls) == 1:
            return calls[0]
        try:
            return torch.cat(calls, dim=position)
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(str(tuple(call.shape[:-1])) for call in calls[:3])
            raise BadRequestError(
                f"{self.name} was called with batches of other sizes ({shapes}, …), which cannot be laid end to end; "
                "watch them one at a time, or read .calls"
            ) from error

    def _check_called(self) -> None:
        if not self.calls:
            raise BadRequestError(
                f"{self.name} was not called within `with watch(model) as seen:`; run the model there"
            )


class Seen(Mapping[str, SeenLayer]):
    """What was watched, by layer: by full name, or by an end of it that fits one."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._layers = {name: SeenLayer(place) for name, place in places.items()}

    def __getitem__(self, name: str) -> SeenLayer:
        return the_one(self._layers, name, "watch")

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


@contextmanager
def watch(model: nn.Module, layers: Layers = None) -> Iterator[Seen]:
    """Within the `with`, what the tokens of a model do is noted, in every call of its layers.

    With a layer come the token groups beside it that are on, each under its own name, as
    `layers.3.ffn.token_groups.law`. The weights stay on the model's device, four bytes each; a position has as many as
    there are tokens in the layers that are watched. Calls from other threads are not noted. A model that torch.compile
    has compiled runs uncompiled meanwhile.

    Args:
        model: any torch model with Pattentions. Of an nn.Linear that is named the tokens are its inputs.
        layers: names, ends of names or patterns; all Pattentions, and all groups beside any layer, unless given.
    """
    seen = Seen(find_places(model, layers, "watch"))
    with watching({name: seen[name].place for name in seen}, lambda name, call: seen[name].add(call)):
        yield seen
