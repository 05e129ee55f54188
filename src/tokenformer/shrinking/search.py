"""The smallest sizes whose loss rises by no more than is allowed.

Enters: a model, what its tokens do on data, and batches with labels. Leaves: sizes by layer, found over sixteenths of
every role's tokens: the cut that costs the least loss per parameter first, until none is left that fits.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from ..errors import BadRequestError
from ..growth.layer import grown_tau, kept_rows
from ..growth.plan import find_config, key_size
from ..growth.step import Growth
from ..pattention import pattention_layers
from .measure import Batch, Use, mean_loss
from .plan import ballast_of, plan_shrink, share_of

PARTS = 16


@contextmanager
def as_if(model: nn.Module, growth: Growth) -> Iterator[None]:
    """Within the `with`, the model computes as it would after a shrinking step."""
    layers, before = dict(pattention_layers(model)), list[tuple[nn.Parameter, Tensor]]()
    taus = {name: layers[name].tau for name in growth.layers}
    try:
        for name, step in growth.layers.items():
            assert step.kept is not None
            for parameter, rows in kept_rows(layers[name], step.kept):
                before.append((parameter, parameter.data))
                parameter.data = rows
            layers[name].tau = grown_tau(taus[name], layers[name].kind, step, growth.method)
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
        for name, tau in taus.items():
            layers[name].tau = tau


def fit_sizes(model: nn.Module, uses: Mapping[str, Use], batches: Collection[Batch], max_loss: float) -> dict[str, int]:
    """The sizes by layer; those that keep theirs are left out."""
    roles, parts = _roles(model), dict.fromkeys(_roles(model), PARTS)
    start = loss = mean_loss(model, batches)
    # By role, the loss per parameter of its next cut when it was last tried. Other cuts since have changed it a little,
    # so a role is tried again before it is cut.
    costs, refused = dict.fromkeys(roles, -math.inf), {}
    while costs:
        role = min(costs, key=lambda one: costs[one])
        cut = {**parts, role: parts[role] - 1}
        if not cut[role]:
            del costs[role]
            continue
        saved = _parameters(model, _sizes(model, roles, parts)) - _parameters(model, _sizes(model, roles, cut))
        if not saved:  # a layer of fewer than sixteen tokens
            parts = cut
            continue
        with as_if(model, plan_shrink(model, uses, _smaller(model, _sizes(model, roles, cut)))):
            tried = mean_loss(model, batches)
        if not tried - start <= max_loss:  # NaN too
            refused[role] = tried - start
            del costs[role]
            continue
        costs[role] = (tried - loss) / saved
        if costs[role] <= min(costs.values()):
            parts, loss = cut, tried
    found = _smaller(model, _sizes(model, roles, parts))
    if not found:
        nearest = min(refused, key=lambda one: refused[one], default="none")
        raise BadRequestError(
            f"shrink: no role can lose a sixteenth of its tokens within max_loss={max_loss}; {nearest} comes nearest, "
            f"with a rise of {refused.get(nearest, math.nan):.4f}"
        )
    return found


def _roles(model: nn.Module) -> dict[str, list[str]]:
    """The layers that get one size together: those of a role or, in other modules, with the same last name."""
    config, found = find_config(model), dict[str, list[str]]()
    roles = {} if config is None else {last: role for role, names in config.token_roles.items() for last in names}
    for name, _ in pattention_layers(model):
        last = name.rpartition(".")[2]
        found.setdefault(roles.get(last, last), []).append(name)
    return found


def _sizes(model: nn.Module, roles: Mapping[str, list[str]], parts: Mapping[str, int]) -> dict[str, int]:
    layers, ballasts = dict(pattention_layers(model)), ballast_of(model)
    return {
        name: share_of(layers[name], ballasts[name], parts[role] / PARTS)
        for role, names in roles.items()
        for name in names
    }


def _smaller(model: nn.Module, sizes: Mapping[str, int]) -> dict[str, int]:
    """Those sizes that are not what the layers have."""
    return {name: sizes[name] for name, layer in pattention_layers(model) if sizes[name] < layer.num_tokens}


def _parameters(model: nn.Module, sizes: Mapping[str, int]) -> int:
    """How many numbers these tokens have."""
    return sum(sizes[name] * (key_size(layer) + layer.d_out) for name, layer in pattention_layers(model))
