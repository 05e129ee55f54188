"""grow_optimizer(): what an optimizer remembers of the tokens follows them across a growth step.

Enters: an optimizer (or its state on disk, keyed by parameter name), the model before and after growth.
Leaves: an optimizer for the grown model, with the same groups and step counts. moments.py has the rules.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ..errors import BadRequestError, did_you_mean
from ..models import growth_records
from ..pattention import pattention_layers
from .moments import FOLLOWING, MOMENTS, Moment, Rule, copied_state, grown_state, moments_of, rules_for
from .plan import find_stack, key_size
from .rates import rates_follow
from .step import REARRANGING, DepthGrowth, Growth, LayerGrowth


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
    _rules_of(optimizer, _names_of(model), growth)


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
            return _between(old_model, new_model, new.growth_history[-1])
    raise BadRequestError("grow_optimizer: new_model has no record of a growth step; pass growth=plan_growth(…)")


def _between(old_model: nn.Module, new_model: nn.Module, record: Mapping[str, Any]) -> Growth:
    """The step from one model to the other, from what the larger one's record says of it."""
    method, depth = record["method"], None
    if method in REARRANGING:
        raise BadRequestError(
            f"grow_optimizer: which tokens a {method} kept is not in the model's record; pass growth=, the last_growth "
            f"of the model that {method} returned"
        )
    if "blocks" in record:
        depth = DepthGrowth(**record["blocks"], stack=find_stack(new_model)[0])
    growth = Growth(method, record["seed"], record["noise"], {}, depth)
    old = dict(pattention_layers(old_model))
    for name, layer in pattention_layers(new_model):
        before, new = growth.origin(name)
        if not new and layer.num_tokens != old[before].num_tokens:
            counts = (old[before].num_tokens, layer.num_tokens)
            step = LayerGrowth.by(method, *counts, key_size(layer), layer.num_quantised)
            growth.layers[before] = step
    return growth


@dataclass(frozen=True)
class Heir:
    """A parameter of the grown model. `new`: it is in a new block, and stands beside the one it is made from."""

    name: str
    parameter: Tensor
    new: bool


def _heirs(new_model: nn.Module, growth: Growth) -> dict[str, list[Heir]]:
    """What has become of every parameter, by its name before: itself first, then those made from it."""
    found: dict[str, list[Heir]] = {}
    for name, parameter in new_model.named_parameters():
        before, new = growth.origin(name)
        found.setdefault(before, []).append(Heir(name, parameter, new))
    return {before: sorted(heirs, key=lambda heir: heir.new) for before, heirs in found.items()}


def _shared_out(
    state: dict[str, Any], before: str, heirs: list[Heir], growth: Growth, moments: Mapping[str, Moment]
) -> Iterator[tuple[Heir, dict[str, Any]]]:
    """The state of every heir of a parameter that was called `before`; those in fresh blocks have none."""
    for heir in heirs:
        if not heir.new:
            yield heir, state
        elif growth.copies(before):
            yield heir, copied_state(state, moments)


def _grow_live(optimizer: Optimizer, old_model: nn.Module, new_model: nn.Module, growth: Growth) -> Optimizer:
    # Everything that can be refused is refused before the first state is touched.
    heirs, in_place = _heirs(new_model, growth), old_model is new_model
    names = {found[0].parameter: before for before, found in heirs.items()} if in_place else _names_of(old_model)
    rules, moments = _rules_of(optimizer, names, growth), moments_of(_unwrapped(optimizer))
    held = [[heir.parameter for p in group["params"] for heir in heirs[names[p]]] for group in optimizer.param_groups]
    if growth.depth is not None:
        # In the order of the model, in which a Trainer that resumes makes its groups.
        place: dict[Tensor, int] = {p: i for i, p in enumerate(new_model.parameters())}
        held = [sorted(parameters, key=place.__getitem__) for parameters in held]
    if in_place:
        target = optimizer
        for group, parameters in zip(optimizer.param_groups, held, strict=True):
            group["params"][:] = parameters
    else:
        target = _remade(optimizer, held)
    for p, rules_of_p in rules.items():
        # When grown in place, each old state is freed before the next one is made. Otherwise the old optimizer may go
        # on, and must not step on states of the new one.
        old = optimizer.state[p]
        kept = (
            old
            if in_place
            else {key: value if key in rules_of_p else copy.deepcopy(value) for key, value in old.items()}
        )
        grown = grown_state(kept, rules_of_p)
        for heir, state in _shared_out(grown, names[p], heirs[names[p]], growth, moments):
            target.state[heir.parameter] = state
    rates_follow(target, {heir.parameter: before for before, found in heirs.items() for heir in found}, growth)
    return target


def _rules_of(optimizer: Optimizer, names: Mapping[Tensor, str], growth: Growth) -> dict[Tensor, dict[str, Rule]]:
    """By parameter, how each of its states follows. `names` are those from before the step."""
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
    moments = moments_of(_unwrapped(optimizer))
    return {p: rules_for(names[p], state, p, growth, moments) for p, state in optimizer.state.items()}


def _names_of(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside Accelerate's, which Trainer uses as well."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def _remade(wrapper: Any, held: list[list[Tensor]]) -> Optimizer:
    """A new optimizer of the same class and settings, and in the same wrapper, for other parameters, by group."""
    optimizer: Any = _unwrapped(wrapper)
    groups = [{**group, "params": held_here} for group, held_here in zip(wrapper.param_groups, held, strict=True)]
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
    heirs = _heirs(new_model, growth)
    grown: dict[str, Any] = {}
    for before, state in state_dict.get("state", {}).items():
        if not isinstance(before, str):
            raise BadRequestError(
                f"grow_optimizer: the state dict is keyed by {before!r}, not by parameter names; save it with "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
            )
        if before not in heirs:
            raise BadRequestError(
                f"grow_optimizer: the state has {before!r}, new_model does not; {did_you_mean(before, heirs)}"
            )
        followed = grown_state(state, rules_for(before, state, heirs[before][0].parameter, growth, MOMENTS))
        grown |= {heir.name: one for heir, one in _shared_out(followed, before, heirs[before], growth, MOMENTS)}
    groups = [
        {**group, "params": [heir.name for before in group["params"] for heir in heirs[before]]}
        for group in state_dict.get("param_groups", ())
    ]
    return {**state_dict, "state": grown, **({"param_groups": groups} if groups else {})}
