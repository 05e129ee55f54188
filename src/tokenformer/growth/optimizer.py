"""grow_optimizer(): what an optimizer remembers of the tokens follows them across a growth step.

Enters: an optimizer (or its state on disk, keyed by parameter name), the model before and after growth.
Leaves: an optimizer for the grown model, with the same groups and step counts. moments.py has the rules.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ..errors import BadRequestError, did_you_mean
from ..models import growth_records
from ..pattention import pattention_layers
from .moments import FOLLOWING, MOMENTS, Rule, grown_state, moments_of, rules_for
from .plan import Growth, LayerGrowth, key_size
from .rates import rates_follow


def grow_optimizer(
    optimizer: Optimizer | Mapping[str, Any],
    old_model: nn.Module,
    new_model: nn.Module,
    *,
    growth: Growth | None = None,
) -> Any:
    """The optimizer of `old_model` made to fit `new_model`.

    A live optimizer gives a live one: a new one of its class for a new model, or itself when the model was grown in
    place (`old_model is new_model`). That also holds for one that Accelerate or Trainer has wrapped. A state dict keyed
    by parameter name, as torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns it, gives a grown
    state dict. `growth` is read from the grown model; pass it if neither the model nor its config has kept it.
    """
    growth = growth or _remembered_growth(old_model, new_model)
    if isinstance(optimizer, Optimizer):
        return _grow_live(optimizer, old_model, new_model, growth)
    return _grow_state_dict(optimizer, new_model, growth)


def check_optimizer(optimizer: Optimizer, model: nn.Module, growth: Growth) -> None:
    """Refuse an optimizer that is not the model's, or whose state cannot follow a growth step that is yet to come."""
    _rules_of(optimizer, model, model, growth)


def _remembered_growth(old_model: nn.Module, new_model: nn.Module) -> Growth:
    growth = getattr(new_model, "last_growth", None)
    if growth is not None:
        return growth
    records = zip(growth_records(old_model), growth_records(new_model), strict=False)
    for (_, old), (_, new) in records if old_model is not new_model else ():
        if new.growth_history:
            steps = len(new.growth_history) - len(old.growth_history or [])
            if steps != 1:
                raise BadRequestError(
                    f"grow_optimizer: new_model is {steps} growth steps from old_model; carry the optimizer over one "
                    "step at a time"
                )
            last = new.growth_history[-1]
            return _between(old_model, new_model, last["method"], last["seed"], last["noise"])
    raise BadRequestError("grow_optimizer: new_model has no record of a growth step; pass growth=plan_growth(…)")


def _between(old_model: nn.Module, new_model: nn.Module, method: str, seed: int, noise: float) -> Growth:
    """The step from one model to the other, whose layers have the same names."""
    new, steps = dict(pattention_layers(new_model)), {}
    for name, layer in pattention_layers(old_model):
        if new[name].num_tokens != layer.num_tokens:
            steps[name] = LayerGrowth.by(method, layer.num_tokens, new[name].num_tokens, key_size(layer))
    return Growth(method, seed, noise, steps)


def _grow_live(optimizer: Optimizer, old_model: nn.Module, new_model: nn.Module, growth: Growth) -> Optimizer:
    # Everything that can be refused is refused before the first state is touched.
    rules = _rules_of(optimizer, old_model, new_model, growth)
    names = _names_of(old_model)
    new_parameters = dict(new_model.named_parameters())
    target = optimizer if old_model is new_model else _remade(optimizer, names, new_parameters)
    for p, rules_of_p in rules.items():
        # When grown in place, each old state is freed before the next one is made.
        target.state[new_parameters[names[p]]] = grown_state(optimizer.state[p], rules_of_p)
    rates_follow(target, _names_of(new_model), growth)
    return target


def _rules_of(
    optimizer: Optimizer, old_model: nn.Module, new_model: nn.Module, growth: Growth
) -> dict[Tensor, dict[str, Rule]]:
    """By parameter, how each of its states follows."""
    names = _names_of(old_model)
    if isinstance(_unwrapped(optimizer), LBFGS):
        raise BadRequestError(
            f"grow_optimizer: LBFGS keeps all parameters in one vector, which cannot grow; use {FOLLOWING}"
        )
    strangers = sum(p not in names for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise BadRequestError(
            f"grow_optimizer: the optimizer holds {strangers} parameters that are not old_model's; give the model it "
            "was made for"
        )
    new_parameters = dict(new_model.named_parameters())
    moments = moments_of(_unwrapped(optimizer))
    return {
        p: rules_for(names[p], state, new_parameters[names[p]], growth, moments) for p, state in optimizer.state.items()
    }


def _names_of(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside Accelerate's, which Trainer uses as well."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def _remade(wrapper: Any, names: dict[Tensor, str], new_parameters: Mapping[str, Tensor]) -> Optimizer:
    """A new optimizer of the same class and settings, and in the same wrapper, for other parameters."""
    optimizer: Any = _unwrapped(wrapper)
    groups = [
        {**group, "params": [new_parameters[names[p]] for p in group["params"]]} for group in wrapper.param_groups
    ]
    # The groups carry most settings, and the constructor only checks them. The others are attributes; those of
    # bitsandbytes are in its `args`.
    more = getattr(getattr(optimizer, "args", None), "__dict__", {})
    kept = {**more, **vars(optimizer), **optimizer.defaults}
    arguments = inspect.signature(type(optimizer)).parameters
    try:
        new = type(optimizer)(groups, **{key: value for key, value in kept.items() if key in arguments})
    except (TypeError, ValueError, NotImplementedError) as error:
        raise BadRequestError(
            f"grow_optimizer: a new {type(optimizer).__name__} cannot be made with the old one's settings ({error}); "
            "grow both in place: grow(model, …, inplace=True, optimizer=optimizer)"
        ) from error
    if wrapper is optimizer:
        return new
    new = type(wrapper)(new, device_placement=wrapper.device_placement, scaler=wrapper.scaler)
    new._is_accelerate_prepared = True  # `accelerator.prepare` takes note of it, and does not wrap it again
    return new


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
        grown[name] = grown_state(state, rules_for(name, state, parameters[name], growth, MOMENTS))
    return {**state_dict, "state": grown}
