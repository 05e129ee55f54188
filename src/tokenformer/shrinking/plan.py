"""What a shrinking step will do, decided and checked before a number moves.

Enters: a model, a request (a factor, or token counts), and what every token does on data. Leaves: a Growth whose layers
say which tokens stay and what becomes of tau; or a one-line error, with the model untouched.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import BadRequestError, did_you_mean
from ..growth.plan import find_config, layers_called
from ..growth.step import REARRANGING, Growth, LayerGrowth
from ..models import Adopted, growth_records
from ..pattention import Pattention, pattention_layers
from .measure import Use

# A size for all layers, or by role in a TokenFormer, by layer name or pattern in any other module.
Factor = float | Mapping[str, float]
Counts = int | Mapping[str, int]


def check_request(factor: Factor | None, num_tokens: Counts | None, max_loss: float | None) -> None:
    """Refuse a request that says no size, or two."""
    sizes = {"factor": factor, "num_tokens": num_tokens, "max_loss": max_loss}
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) != 1:
        raise BadRequestError(
            f"shrink: {' and '.join(given) or 'no size'} was given; give one of factor=0.5, num_tokens={{…}}, "
            "max_loss=0.01"
        )
    if max_loss is not None and not 0 < max_loss < math.inf:
        raise BadRequestError(f"shrink: max_loss={max_loss} was given; a number of nats above 0 is needed")


def check_unfrozen(model: nn.Module, verb: str) -> None:
    """Refuse layers that tell frozen tokens from others by their place."""
    for name, layer in pattention_layers(model):
        if layer.frozen_tokens:
            raise BadRequestError(
                f"{verb}: the first {layer.frozen_tokens} tokens of {name} are frozen, and would no longer be the "
                "first; set frozen_tokens to 0"
            )


def sizes_asked(model: nn.Module, factor: Factor | None, num_tokens: Counts | None) -> dict[str, int]:
    """The token count that each layer is to have; layers that keep theirs are left out."""
    layers, ballasts = dict(pattention_layers(model)), ballast_of(model)
    sizes: dict[str, int] = {}
    if factor is not None:
        for name, share in _by_layer(model, layers, factor, "factor").items():
            if not 0 < share < 1:
                raise BadRequestError(f"shrink: factor={share} was given; it must lie between 0 and 1")
            sizes[name] = share_of(layers[name], ballasts[name], share)
    else:
        assert num_tokens is not None
        sizes = _by_layer(model, layers, num_tokens, "num_tokens")
    for name, count in sizes.items():
        _check_size(name, layers[name].num_tokens, ballasts[name], count)
    return sizes


def share_of(layer: Pattention, ballast: int, share: float) -> int:
    """A share of the tokens of a layer, of which those that only keep the norm constant always stay."""
    return ballast + max(1, round((layer.num_tokens - ballast) * share))


def plan_shrink(model: nn.Module, uses: Mapping[str, Use], sizes: Mapping[str, int]) -> Growth:
    """The step to these sizes: each layer keeps those of its tokens that do most, in their order."""
    layers, ballasts, steps = dict(pattention_layers(model)), ballast_of(model), {}
    for name, count in sizes.items():
        layer, use = layers[name], uses[name]
        kept = _first(use.scores, ballasts[name], count).sort().values
        steps[name] = LayerGrowth(
            layer.num_tokens,
            count,
            1,
            kept=tuple(kept.tolist()),
            tau_factor=tau_factor(layer.kind, use.shares[kept].sum().item()),
        )
    return Growth("shrink", 0, 0.0, steps)


def plan_sort(model: nn.Module, ranking: Mapping[str, Tensor]) -> Growth:
    """The step that puts the tokens of each layer of a ranking in its order, the highest first."""
    layers, ballasts, steps = dict(pattention_layers(model)), ballast_of(model, "sort"), {}
    for name, scores in ranking.items():
        if name not in layers:
            raise BadRequestError(f"sort: the ranking has the layer {name!r}; {did_you_mean(name, layers)}")
        count = layers[name].num_tokens
        if scores.shape != (count,) or not scores.isfinite().all():
            raise BadRequestError(
                f"sort: the ranking of {name} has shape {tuple(scores.shape)}; {count} finite numbers are needed, one "
                "for each token"
            )
        order = tuple(_first(scores, ballasts[name], count).tolist())
        steps[name] = LayerGrowth(count, count, 1, kept=order)
    return Growth("sort", 0, 0.0, steps)


def ballast_of(model: nn.Module, verb: str = "shrink") -> dict[str, int]:
    """How many tokens of each layer, its last ones, only keep the norm of an adopted layer constant."""
    found = {name: 0 for name, _ in pattention_layers(model)}
    names = {module: name for name, module in model.named_modules()}
    for part, record in growth_records(model):
        if not isinstance(record, Adopted):
            continue
        grown = [step["method"] for step in record.growth if step["method"] not in REARRANGING]
        for name, entry in record.layers.items():
            if entry["ballast"] and grown:
                raise BadRequestError(
                    f"{verb}: {name} was adopted and has grown since, so which of its tokens keep the norm constant is "
                    f"not known; {verb} the adopted model before it grows"
                )
            found[names[part.base_model.get_submodule(name)]] = entry["ballast"]
    return found


def _by_layer(model: nn.Module, layers: dict[str, Pattention], asked: object, what: str) -> dict:
    """What is asked of each layer, where one number is for all of them."""
    if not isinstance(asked, Mapping):
        return dict.fromkeys(layers, asked)
    if not asked:
        raise BadRequestError(f"shrink: {what} is empty; name at least one size")
    config = find_config(model)
    return {name: size for key, size in asked.items() for name in layers_called(key, layers, config, "shrink")}


def _check_size(name: str, before: int, ballast: int, after: int) -> None:
    if after >= before:
        raise BadRequestError(
            f"shrink: {name} has {before} tokens and {after} were asked for; ask for fewer, or leave it out to keep "
            "its size"
        )
    if after <= ballast:
        why = f", {ballast} of which keep the norm constant," if ballast else ""
        raise BadRequestError(
            f"shrink: {name} has {before} tokens{why} and {after} were asked for; at least {ballast + 1} are needed"
        )


def _first(scores: Tensor, ballast: int, count: int) -> Tensor:
    """The tokens with the highest scores, in that order, and at the end the ballast: `count` of them."""
    free = len(scores) - ballast
    best = scores[:free].cpu().argsort(descending=True, stable=True)[: count - ballast]
    return torch.cat([best, torch.arange(free, len(scores))])


def tau_factor(kind: str, kept: float) -> float:
    """What tau is multiplied by, so that the weights of tokens with this share of the normaliser are right on average.

    Without the other tokens the normaliser of a row is smaller, and the weights of those that stay would grow.
    """
    # For the L2 kinds this is the root of the mean square of ‖kept scores‖ / ‖all scores‖. Their mean is the constant
    # that leaves the kept scores nearest to what they were, but the two differ by less than their effect on the loss
    # can be told apart, and mean squares add up over tokens: one pass over the data serves every choice of them.
    return (kept if kind == "softmax" else math.sqrt(kept)) or 1.0
