"""Swap chosen nn.Linear layers of any torch model for Pattention, in place.

    model = torchvision_or_transformers_or_your_own_model()
    replace_linears(model, ["encoder.*.fc1", "encoder.*.fc2"], num_tokens=1024)

The new layers start untrained, with outputs at the scale of the linear's, and have no bias: a linear's bias goes with
it. `tokenformer.adopt` puts layers in place that compute what the linears did.
"""

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from torch import nn

from ..errors import BadRequestError, did_you_mean
from .groups import groups_of
from .module import Pattention, set_submodule

# The mean square of a token's weight at birth, for scores z ~ N(0, 1): E[GeLU(z)²], 1 where the L2 norm comes last, and
# E[exp(2z)] / E[exp(z)]², which is e, for softmax.
WEIGHT_POWER = {
    "l2_gelu": 0.425,
    "l2_gelu_tanh": 0.425,
    "l2_silu": 0.356,
    "l2_relu": 0.5,
    "gelu_l2": 1,
    "softmax": math.e,
}

Predicate = Callable[[str, nn.Linear], bool]


def replace_linears(
    model: nn.Module,
    which: str | Iterable[str] | Predicate,
    num_tokens: int | Callable[[nn.Linear], int] | None = None,
    *,
    kind: str = "l2_gelu",
) -> nn.Module:
    """Replace the linears named by `which` (names, patterns with `*`, or predicate(name, linear)).

    `num_tokens` is a number, a function of the linear, or None for as many tokens as keep the parameter
    count. Returns the model, changed in place; nothing is changed if the request has an error.
    """
    linears = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    names = _select(linears, which)
    for name in names:
        _check_replaceable(model, name, linears[name])
    # A linear that has two names is one layer, and stays one.
    replacements: dict[nn.Linear, Pattention] = {}
    for name in names:
        linear = linears[name]
        if linear not in replacements:
            replacements[linear] = _like(linear, num_tokens, kind)
    for name in names:
        set_submodule(model, name, replacements[linears[name]])
    return model


def _select(linears: dict[str, nn.Linear], which: str | Iterable[str] | Predicate) -> list[str]:
    if callable(which):
        names = [name for name, linear in linears.items() if which(name, linear)]
        if not names:
            raise BadRequestError(f"replace_linears: the predicate chose none of the model's {len(linears)} linears")
        return names
    names = []
    for pattern in [which] if isinstance(which, str) else which:
        matched = [name for name in linears if fnmatchcase(name, pattern)]
        if not matched:
            hint = did_you_mean(pattern, linears) if linears else "the model has no nn.Linear"
            raise BadRequestError(f"replace_linears: no nn.Linear is named {pattern!r}; {hint}")
        names += [name for name in matched if name not in names]
    if not names:
        raise BadRequestError("replace_linears: no name was given; give names, patterns or a predicate")
    return names


def _check_replaceable(model: nn.Module, name: str, linear: nn.Linear) -> None:
    if linear is model:
        raise BadRequestError(
            "replace_linears: the model itself is an nn.Linear and cannot be replaced in place; build a Pattention"
        )
    if groups_of(linear) is not None:
        raise BadRequestError(
            f"replace_linears: token groups stand beside {name!r}, and were learnt there; replace it first and add "
            "groups then, or remove_tokens them"
        )
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
        raise BadRequestError(
            f"replace_linears: {name!r} is inside nn.MultiheadAttention, which reads its weight without calling it; "
            "use tokenformer.nn.MultiheadAttention"
        )
    sharers = [
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter is linear.weight and module is not linear
    ]
    if sharers:
        raise BadRequestError(
            f"replace_linears: {name!r} shares its weight with {sharers[0]!r}; untie them first or leave it out"
        )


def _like(linear: nn.Linear, num_tokens: int | Callable[[nn.Linear], int] | None, kind: str) -> Pattention:
    d_in, d_out, weight = linear.in_features, linear.out_features, linear.weight
    if num_tokens is None:
        num_tokens = max(1, round(d_in * d_out / (d_in + d_out)))
    elif callable(num_tokens):
        num_tokens = num_tokens(linear)
    new = Pattention(d_in, d_out, num_tokens, kind, device=weight.device, dtype=weight.dtype)
    if not weight.is_meta:
        # On rows of unit variance the linear's outputs have this mean square.
        output_power = weight.detach().float().square().sum().item() / d_out
        new.reset_parameters(value_std=(output_power / (WEIGHT_POWER[kind] * num_tokens)) ** 0.5)
    new.train(linear.training)
    return new
