"""ablate(): a model without some of its tokens, for as long as one looks.

    with tokenformer.ablate(model, {"layers.3.ffn": [17, 40]}):
        model.generate(**inputs)

Enters: a model, and tokens by layer. Within the `with` they are not there, add more or less than they would, or add the
same everywhere. Afterwards, also after an error, the model is as it was: no weight is touched.

A layer is told what to attend over by `_tokens`, and the groups beside it by `_own_tokens`; an ablation stands before
these two, on the object, so that the layer's fast form runs as ever and nothing is slower where nothing is ablated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadRequestError, shown
from ..pattention import Pattention
from ..pattention.groups import groups_of
from .calls import running_eagerly
from .places import LINEARS, Place, check_tokens, find_places

# Of a place: token numbers, or how much of each is left: {17: 0, 40: 2.5}.
Tokens = Iterable[int] | Mapping[int, float]


@dataclass(eq=False)
class Ablation:
    """What becomes of the tokens of one place. `factors` [n] multiply what they add.

    gone: [n], True where a token is as if it were not there. constant: [d_out], what is added instead.
    """

    group: str | None
    factors: Tensor | None
    gone: Tensor | None
    constant: Tensor | None


@contextmanager
def ablate(
    model: nn.Module,
    tokens: Mapping[str, Tokens],
    *,
    scale: float | None = None,
    keep_norm: bool = False,
    mean: Mapping[str, Tensor] | None = None,
) -> Iterator[None]:
    """Within the `with`, the model computes as if these tokens were not there, exactly as if their rows were deleted.

    What one gives, by the names of layers or patterns, are token numbers. Several may be nested, in any order. Calls
    from other threads compute so too, and models that torch.compile has compiled run uncompiled meanwhile.

    Args:
        model: any torch model with Pattentions; of an nn.Linear that is named the tokens are its inputs.
        tokens: `{"layers.3.ffn": [17, 40], "layers.2.ffn.token_groups.law": [0]}`; or with what each is multiplied by,
            `{"layers.3.ffn": {17: 0, 40: 2.5}}`.
        scale: multiply what these tokens add, instead of removing them. The other tokens' weights stay as they are.
        keep_norm: leave the tokens in the layer's normaliser, so that the others' weights stay: as scale=0.
        mean: by layer, the mean weight of every token, [n], as `token_statistics` has it; the tokens then add their
            mean everywhere.
    """
    if (scale is not None) + keep_norm + (mean is not None) > 1:
        raise BadRequestError("ablate: scale, keep_norm and mean exclude each other; give one of them")
    planned: list[tuple[Place, Ablation]] = []
    for name, chosen in _by_name(tokens).items():
        for place in find_places(model, name, "ablate", with_groups=False).values():
            planned.append((place, _planned(place, chosen, 0.0 if keep_norm else scale, mean)))
    with putting_on(planned):
        yield


@contextmanager
def putting_on(planned: Iterable[tuple[Place, Ablation]]) -> Iterator[None]:
    """Within the `with`, these ablations are on."""
    with ExitStack() as stack:
        stack.enter_context(running_eagerly())
        for place, ablation in planned:
            stack.enter_context(
                _of_linear(place, ablation) if isinstance(place.layer, LINEARS) else _on(place, ablation)
            )
        yield


def _by_name(tokens: Any) -> dict[str, Any]:
    if not isinstance(tokens, Mapping):
        raise BadRequestError(
            f"ablate: tokens={shown(tokens)} was given; give them by layer: {{'layers.3.ffn': [17, 40]}}"
        )
    return dict(tokens)


def _planned(place: Place, chosen: Any, scale: float | None, mean: Mapping[str, Tensor] | None) -> Ablation:
    """The ablation of one place, checked."""
    if isinstance(chosen, str) or not isinstance(chosen, Iterable):
        raise BadRequestError(f"ablate: {shown(chosen)} was given for {place.name}; give a list of token numbers")
    numbers = check_tokens(place, list(chosen), "ablate")
    like: dict[str, Any] = {"device": place.values.device}
    if isinstance(chosen, Mapping):
        if scale is not None or mean is not None:
            raise BadRequestError("ablate: numbers were given for single tokens; leave out scale, keep_norm and mean")
        left = torch.tensor([float(factor) for factor in chosen.values()], **like)
    else:
        left = torch.full((len(numbers),), 0.0 if scale is None else float(scale), **like)
    if not left.isfinite().all():
        raise BadRequestError(f"ablate: the tokens of {place.name} cannot be multiplied by {left.tolist()}")
    if mean is None and scale is None and not isinstance(chosen, Mapping):
        gone = torch.zeros(place.num_tokens, dtype=torch.bool, **like)
        gone[numbers] = True
        return Ablation(place.group, None, gone, None)
    factors = torch.ones(place.num_tokens, **like)
    factors[numbers] = left
    return Ablation(place.group, factors, None, None if mean is None else _mean_output(place, numbers, mean))


def _mean_output(place: Place, numbers: list[int], mean: Mapping[str, Tensor]) -> Tensor:
    """What tokens add on average."""
    weights = mean.get(place.name) if isinstance(mean, Mapping) else None
    if not isinstance(weights, Tensor) or weights.shape != (place.num_tokens,):
        raise BadRequestError(
            f"ablate: mean has no {place.num_tokens} mean weights for {place.name}; "
            "give {name: found.mean for name, found in token_statistics(model, batches).items()}"
        )
    values = place.values
    return weights[numbers].to(values.device, values.dtype) @ values[numbers]


class Interventions:
    """All ablations that are on in one layer and the groups beside it. They stand before two methods of these."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.groups = layer, groups_of(layer)
        self.ablations: list[Ablation] = []

    def put_on(self) -> None:
        """Stand before the methods."""
        self.layer.__dict__["_interventions"] = self
        if isinstance(self.layer, Pattention):
            self.layer.__dict__["_tokens"] = self.tokens
        if self.groups is not None:
            self.groups.__dict__["_own_tokens"] = self.own_tokens

    def take_off(self) -> None:
        """The layer as it was."""
        for part, name in ((self.layer, "_interventions"), (self.layer, "_tokens"), (self.groups, "_own_tokens")):
            if part is not None:
                part.__dict__.pop(name, None)

    def tokens(self, x: Tensor, prefix: Any = None) -> Any:
        """Those that share the layer's normaliser, without what is ablated."""
        if prefix is not None:
            raise BadRequestError("ablate: in training, rows are divided among nested sizes; call model.eval() first")
        found = type(self.layer)._tokens(self.layer, x)
        sizes: dict[str | None, int] = {None: self.layer.num_tokens}
        if self.groups is not None:
            sizes |= {name: self.groups[name].num_tokens for name in self.groups.chosen("shared")}
        return self._without(found, sizes, x)

    def own_tokens(self, x: Tensor) -> Any:
        """The same of the groups with a normaliser of their own."""
        assert self.groups is not None
        found = type(self.groups)._own_tokens(self.groups, x)
        if found is None:
            return None
        tokens, *rest = found
        sizes: dict[str | None, int] = {name: self.groups[name].num_tokens for name in self.groups.chosen("own")}
        return (self._without(tokens, sizes, x), *rest)

    def _without(self, tokens: Any, sizes: Mapping[str | None, int], x: Tensor) -> Any:
        values, mask, start = tokens.values, tokens.mask, 0
        for name, size in sizes.items():
            here = slice(start, start + size)
            start += size
            for ablation in (one for one in self.ablations if one.group == name):
                if ablation.factors is not None:
                    factors = values.new_ones(len(values))
                    factors[here] = ablation.factors.to(values)
                    values = values * factors.unsqueeze(1)
                if ablation.gone is not None:
                    there = torch.ones(len(values), dtype=torch.bool, device=x.device)
                    there[here] = ~ablation.gone.to(x.device)
                    mask = there if mask is None else mask & there
        return tokens._replace(values=values, mask=mask)


@contextmanager
def _on(place: Place, ablation: Ablation) -> Iterator[None]:
    """Of a Pattention, or of a group beside any layer."""
    layer = place.layer
    found = layer.__dict__.get("_interventions") or Interventions(layer)
    found.ablations.append(ablation)
    found.put_on()
    with ExitStack() as stack:
        if ablation.constant is not None:
            stack.enter_context(layer.register_forward_hook(_adding(ablation.constant)))
        try:
            yield
        finally:
            found.ablations.remove(ablation)
            if not found.ablations:
                found.take_off()


@contextmanager
def _of_linear(place: Place, ablation: Ablation) -> Iterator[None]:
    """Of a linear layer, by its inputs."""

    def smaller(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = args
        if ablation.factors is not None:
            return (x * ablation.factors.to(x), *rest)
        assert ablation.gone is not None
        return (x.masked_fill(ablation.gone, 0), *rest)

    with ExitStack() as stack:
        stack.enter_context(place.layer.register_forward_pre_hook(smaller))
        if ablation.constant is not None:
            stack.enter_context(place.layer.register_forward_hook(_adding(ablation.constant)))
        yield


def _adding(constant: Tensor) -> Callable[..., Any]:
    """A hook that adds a constant to a layer's output."""

    def add(layer: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + constant.to(output[0]), *output[1:])
        return output + constant.to(output)

    return add
