"""grow_optimizer(): Adam's moments follow the tokens across a growth step.

Enters: an optimizer (or its state on disk, keyed by parameter name), the model before and after growth.
Leaves: an optimizer for the grown model, with the same groups and step counts. docs/growth.md derives the rules:

    appended tokens      moments zero
    value of a copy      its gradient is the old value's: moments kept
    key of a copy        its gradient is a c-th of the old key's plus a part of zero mean from the random parts:
                         first moment / c, second moment · (1/c² + noise² · (1 − 1/c)); a key's bias is part of the key
    the output's bias    not touched
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import BadRequestError, did_you_mean
from ..models import adopted_models
from ..pattention import pattention_layers
from .plan import Growth, LayerGrowth, find_config, key_size, plan_growth

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")


def grow_optimizer(
    optimizer: Optimizer | Mapping[str, Any],
    old_model: nn.Module,
    new_model: nn.Module,
    *,
    growth: Growth | None = None,
) -> Any:
    """The optimizer of `old_model` made to fit `new_model`.

    A live optimizer gives a live one: a new one of its class for a new model, or itself when the model was grown in
    place (`old_model is new_model`). A state dict keyed by parameter name, as
    torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns it, gives a grown state dict.
    `growth` is read from the grown model; give it if neither the model nor its config remembers it.
    """
    growth = growth or _remembered_growth(old_model, new_model)
    if isinstance(optimizer, Optimizer):
        return _grow_live(optimizer, old_model, new_model, growth)
    return _grow_state_dict(optimizer, new_model, growth)


def _remembered_growth(old_model: nn.Module, new_model: nn.Module) -> Growth:
    growth = getattr(new_model, "last_growth", None)
    if growth is not None:
        return growth
    config = find_config(new_model)
    if config is not None and config.growth_history and old_model is not new_model:
        last = config.growth_history[-1]
        changed = {role: n for role, n in last["after"].items() if n != last["before"][role]}
        return plan_growth(
            old_model,
            num_tokens=changed,
            method=last["method"],
            seed=last["seed"],
            noise=last["noise"],
            exact=False,
        )
    for _, record in adopted_models(new_model):
        if record.growth and old_model is not new_model:
            return _between(old_model, new_model, **record.growth[-1])
    raise BadRequestError("grow_optimizer: new_model does not remember a growth step; give growth=plan_growth(…)")


def _between(old_model: nn.Module, new_model: nn.Module, method: str, seed: int, noise: float) -> Growth:
    """The step from one model to the other, whose layers have the same names."""
    new, steps = dict(pattention_layers(new_model)), {}
    for name, layer in pattention_layers(old_model):
        if new[name].num_tokens != layer.num_tokens:
            steps[name] = LayerGrowth.by(method, layer.num_tokens, new[name].num_tokens, key_size(layer))
    return Growth(method, seed, noise, steps)


def _grow_live(optimizer: Optimizer, old_model: nn.Module, new_model: nn.Module, growth: Growth) -> Optimizer:
    names = {id(parameter): name for name, parameter in old_model.named_parameters()}
    strangers = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise BadRequestError(
            f"grow_optimizer: the optimizer holds {strangers} parameters that are not old_model's; give the model it "
            "was made for"
        )
    new_parameters = dict(new_model.named_parameters())
    # Everything that can be refused is refused before the first state is touched.
    factors = {
        p: _factors(names[id(p)], state, new_parameters[names[id(p)]], growth) for p, state in optimizer.state.items()
    }
    if old_model is new_model:
        target = optimizer
    else:
        groups = [
            {**group, "params": [new_parameters[names[id(p)]] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        # The groups carry every setting; the constructor only checks them. Some defaults are not its arguments.
        arguments = inspect.signature(type(optimizer)).parameters
        defaults = {key: value for key, value in optimizer.defaults.items() if key in arguments}
        target = type(optimizer)(groups, **defaults)
    for p, state_factors in factors.items():
        name = names[id(p)]
        # Grown in place, an old state is let go before the next one is made.
        target.state[new_parameters[name]] = _grow_entry(name, optimizer.state[p], state_factors, growth)
    return target


def _grow_state_dict(state_dict: Mapping[str, Any], new_model: nn.Module, growth: Growth) -> dict[str, Any]:
    parameters = dict(new_model.named_parameters())
    grown = {}
    for name, state in state_dict.get("state", {}).items():
        if not isinstance(name, str):
            raise BadRequestError(
                f"grow_optimizer: the state dict is keyed by {name!r}, not by parameter names; save it with "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
            )
        if name not in parameters:
            raise BadRequestError(
                f"grow_optimizer: the state has {name!r}, new_model does not; {did_you_mean(name, parameters)}"
            )
        grown[name] = _grow_entry(name, state, _factors(name, state, parameters[name], growth), growth)
    return {**state_dict, "state": grown}


def _grow_entry(name: str, state: Mapping[str, Any], factors: dict[str, float], growth: Growth) -> dict[str, Any]:
    """The state of one parameter, with the keys of `factors` grown and multiplied."""
    step = growth.layers.get(name.rpartition(".")[0])
    if step is None:
        return dict(state)
    return {key: _grow_rows(value, step, factors[key]) if key in factors else value for key, value in state.items()}


def _factors(name: str, state: Mapping[str, Any], parameter: Tensor, growth: Growth) -> dict[str, float]:
    """What each state with a row a token is multiplied by when its layer grows."""
    layer, _, kind = name.rpartition(".")
    step = growth.layers.get(layer)
    if step is None or kind == "bias":
        return {}
    factors = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue  # the step count
        # A model grown in place has its new number of rows already.
        if value.shape[0] != step.before or value.shape[1:] != parameter.shape[1:]:
            raise BadRequestError(
                f"grow_optimizer: state {key!r} of {name} has shape {tuple(value.shape)}, and only states with a row a "
                f"token ({step.before}) can grow; use an Adam or SGD optimizer, or start its state afresh"
            )
        factors[key] = _factor(name, key, kind, step, growth.noise)
    return factors


def _factor(name: str, key: str, kind: str, step: LayerGrowth, noise: float) -> float:
    c = step.copies
    if c == 1 or (kind == "value_tokens" and key in FIRST_MOMENTS + SECOND_MOMENTS):
        return 1.0
    if key in FIRST_MOMENTS:
        return 1 / c
    if key in SECOND_MOMENTS:
        return 1 / c**2 + noise**2 * (1 - 1 / c)
    raise BadRequestError(
        f"grow_optimizer: how state {key!r} of {name} follows a split is not known; use an Adam or SGD optimizer, grow "
        "with method='zero', or start its state afresh"
    )


def _grow_rows(rows: Tensor, step: LayerGrowth, factor: float) -> Tensor:
    grown = torch.zeros(step.after, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    for copy in range(step.copies):
        grown[copy * step.before : (copy + 1) * step.before] = rows * factor
    return grown
