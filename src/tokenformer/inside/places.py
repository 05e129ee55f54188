"""Where tokens are: the layers of a model by full name, by its end, or by a pattern.

Enters: any torch model, and names: `model.layers.3.ffn`, `layers.3.ffn`, `*.ffn`, or of a token group beside a layer
`layers.3.ffn.token_groups.medical`. Leaves: places, in the order of the model; or a one-line error with the nearest
name.

Of an nn.Linear, which is looked for only if no Pattention has that name, the tokens are its inputs: in the second
linear of a feed-forward network these are the neurons, whose value is a column of the weight. So what is measured of
parameter tokens can be measured of neurons.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from ..errors import BadRequestError, did_you_mean, shown
from ..pattention import Pattention
from ..pattention.groups import TokenGroup, groups_of

Found = TypeVar("Found")
Layers = str | Iterable[str] | None
LINEARS = (nn.Linear, Conv1D)
GROUPS = ".token_groups."


@dataclass(frozen=True)
class Place:
    """Tokens with one name: a layer's own, those of a group beside it, or the inputs of a linear layer.

    layer: the module that is called with rows. group: the name of the token group, None for the layer's own.
    """

    name: str
    layer: nn.Module
    group: str | None = None

    @property
    def layer_name(self) -> str:
        return self.name.partition(GROUPS)[0] if self.group else self.name

    @property
    def values(self) -> Tensor:
        """[n, d_out]: what every token adds to the output, at a weight of 1."""
        part: Any = self.layer if self.group is None else self._groups[self.group]
        if isinstance(part, nn.Linear):
            return part.weight.detach().mT
        return (part.weight if isinstance(part, Conv1D) else part.value_tokens).detach()

    @property
    def keys(self) -> Tensor | None:
        """[n, d_in]; None for a linear layer, whose tokens have none of their own."""
        part: Any = self.layer if self.group is None else self._groups[self.group]
        return None if isinstance(part, LINEARS) else part.key_tokens.detach()

    @property
    def bias(self) -> Tensor | None:
        """What the layer adds besides."""
        bias = None if self.group else getattr(self.layer, "bias", None)
        return None if bias is None else bias.detach()

    @property
    def num_tokens(self) -> int:
        return self.values.shape[0]

    @property
    def _groups(self) -> Any:
        return groups_of(self.layer)


def bare(model: nn.Module) -> Any:
    """A model without torch.compile's wrapper, whose names are those of the model."""
    return getattr(model, "_orig_mod", model)


def find_places(model: nn.Module, layers: Layers, what: str, *, with_groups: bool = True) -> dict[str, Place]:
    """The places that `layers` means, all of them if it is None; with a layer come the groups beside it.

    `what` is how errors begin.
    """
    tokens, linears = _token_places(bare(model)), dict[str, Place]()
    if layers is None:
        if not tokens:
            raise BadRequestError(
                f"{what}: {type(model).__name__} has no Pattention layer; name linear layers, whose tokens are their "
                "inputs, such as layers=['*.dense_4h_to_h']"
            )
        return _readable(tokens, what)
    wanted = [layers] if isinstance(layers, str) else list(layers) if isinstance(layers, Iterable) else []
    if not wanted or not all(isinstance(one, str) for one in wanted):
        raise BadRequestError(f"{what}: layers={shown(layers)} was given; give names or patterns, such as ['*.ffn']")
    names: set[str] = set()
    for one in wanted:
        found = matching(tokens, one)
        if not found:
            linears = linears or _linear_places(bare(model))
            found = matching(linears, one)
        if not found:
            raise BadRequestError(f"{what}: no layer is called {one!r}; {nearest(one, tokens or linears)}")
        names |= found
        if with_groups:
            names |= {name for name, place in tokens.items() if place.group and place.layer_name in found}
    places = {**tokens, **linears}
    order = [name for name, _ in bare(model).named_modules() if name in names]
    return _readable({name: places[name] for name in order}, what)


def _readable(places: dict[str, Place], what: str) -> dict[str, Place]:
    """The same places, or an error if the tokens of one are not at hand as numbers."""
    for name, place in places.items():
        if isinstance(place.values, DTensor):
            raise BadRequestError(f"{what}: {name} is sharded over devices; give the full model")
        if isinstance(place.layer, Pattention) and place.layer.num_quantised and not place.group:
            raise BadRequestError(f"{what}: tokens of {name} are quantised; give dequantize(copy.deepcopy(model))")
    return places


def matching(names: Iterable[str], wanted: str) -> set[str]:
    """Those that are called so, or else end so; or that fit the pattern."""
    names = set(names)
    if wanted in names:
        return {wanted}
    if any(sign in wanted for sign in "*?["):
        return {name for name in names if fnmatchcase(name, wanted) or fnmatchcase(name, f"*.{wanted}")}
    return {name for name in names if name.endswith(f".{wanted}")}


def the_one(found: Mapping[str, Found], wanted: Any, what: str) -> Found:
    """What has this name in a mapping; a one-line error for none and for several."""
    names = matching(found, wanted) if isinstance(wanted, str) else set()
    if len(names) == 1:
        return found[names.pop()]
    if names:
        several = ", ".join(sorted(names)[:3])
        raise BadRequestError(f"{what}: {wanted!r} fits {len(names)} layers ({several}, …); name one of them")
    raise BadRequestError(f"{what}: no layer is called {wanted!r}; {nearest(str(wanted), found)}")


def nearest(wanted: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name; full names and their ends are looked through."""
    names = list(names)
    if not names:
        return "the model has no linear layer and no Pattention"
    ends = [".".join(name.split(".")[first:]) for name in names for first in range(name.count(".") + 1)]
    near = did_you_mean(wanted, ends)
    return near if near.startswith("did you mean") else did_you_mean("", names)


def check_tokens(place: Place, tokens: Iterable[int], what: str) -> list[int]:
    """Whole numbers below the number of tokens; negative ones count from the end."""
    return check_numbers(place.name, place.num_tokens, tokens, what)


def check_numbers(name: str, n: int, tokens: Iterable[int], what: str) -> list[int]:
    """The same where the layer is known by its name and its number of tokens alone."""
    checked = []
    for token in tokens:
        number = token.item() if isinstance(token, Tensor) and token.dim() == 0 else token
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise BadRequestError(f"{what}: {shown(token)} was given for {name}; tokens are whole numbers")
        number = number.__index__()
        if not -n <= number < n:
            raise BadRequestError(f"{what}: {name} has {n} tokens, 0 to {n - 1}, and {number} was asked for")
        checked.append(number % n)
    return checked


def _token_places(model: nn.Module) -> dict[str, Place]:
    places = {}
    for name, module in model.named_modules():
        layer, _, group = name.partition(GROUPS) if GROUPS in name else (name, "", "")
        if isinstance(module, Pattention):
            places[name] = Place(name, module)
        elif isinstance(module, TokenGroup):
            places[name] = Place(name, model.get_submodule(layer), group)
    return places


def _linear_places(model: nn.Module) -> dict[str, Place]:
    return {name: Place(name, module) for name, module in model.named_modules() if isinstance(module, LINEARS)}
