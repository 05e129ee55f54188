"""Should this model grow, and when? A recipe and a budget in, the best ladder and what else the budget could buy out.

    tokenformer plan recipes/mine.yaml --flops 1e15 --runs runs/small runs/large …

Enters: a recipe, whose model is the smallest size, a budget, and a scaling law. Leaves: a Plan, with a recipe.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import yaml

from ..errors import BadRequestError
from ..growth import apply_growth, plan_growth
from ..growth.rates import shape_at_birth
from ..models import TokenFormerBaseConfig
from ..training.ladder import first_config
from ..training.recipe import Recipe
from .climb import Climb, Size, anytime_climb, best_climb, climbed
from .law import ScalingLaw

GrowBy = Literal["tokens", "depth"]
GROW_BY: tuple[str, ...] = get_args(GrowBy)
# Doublings that are looked at, unless a largest size is given.
MOST_DOUBLINGS = 6
# Of training, what survives a doubling: fitted to the ladders of experiments/planning.
TRANSFER = 0.86
# A loss that is closer than this to another is called equal.
EQUAL = 0.001


@dataclass(frozen=True)
class Plan:
    """What to do with a budget. `scratch`: every size trained from scratch with all of it, the smallest first.

    at_largest: whether the largest size is wanted, whatever others would reach. anytime: whether the ladder is one to
    stop anywhere, for which the loss at the end is not all that counts.
    """

    recipe: Recipe
    by: GrowBy
    law: ScalingLaw
    transfer: float
    units_per_step: int
    climb: Climb
    scratch: tuple[Climb, ...]
    at_largest: bool
    anytime: bool = False

    @property
    def best_from_scratch(self) -> Climb:
        return self.scratch[-1] if self.at_largest else min(self.scratch, key=lambda climb: climb.loss)

    @property
    def grows(self) -> bool:
        """Whether to grow at all."""
        better = self.climb.loss < (1 - EQUAL) * self.best_from_scratch.loss
        return len(self.climb.rungs) > 1 and (self.anytime or better)

    @property
    def chosen(self) -> Climb:
        """The ladder, or training from scratch if that is as good."""
        return self.climb if self.grows else self.best_from_scratch

    def deviation(self, *climbs: Climb) -> float | None:
        """The uncertainty of a predicted loss; of two, of their difference."""

        def predict(law: ScalingLaw) -> float:
            losses = [
                climbed(law, [(rung.size, rung.seen) for rung in one.rungs], self.transfer).loss for one in climbs
            ]
            return losses[0] - sum(losses[1:])

        return self.law.deviation(predict)

    def steps(self, climb: Climb) -> list[int]:
        """The optimizer steps of each stage."""
        return [max(1, round(rung.seen / self.units_per_step)) for rung in climb.rungs]

    def to_yaml(self) -> str:
        """The recipe with the stages that were chosen."""
        values: dict[str, Any] = deepcopy(self.recipe.resolved())
        names = [climb.rungs[0].size.name for climb in self.scratch]
        stages: list[dict[str, Any]] = []
        at = 0
        for rung, steps in zip(self.chosen.rungs, self.steps(self.chosen), strict=True):
            place = names.index(rung.size.name)
            stages.append({**_request(self.recipe, self.by, at, place, bool(stages)), "steps": steps})
            at = place
        values["training"].pop("max_steps", None)
        values["training"].pop("output_dir", None)
        values["name"] = f"{self.recipe.name}-planned"
        doublings = names.index(self.chosen.rungs[0].size.name)
        if doublings:
            config = first_config(self.recipe)
            values["model"] |= _larger(config, self.by, doublings)
            # The learning rate is still that of the recipe's own size.
            if values["training"]["rate_base"] is None:
                values["training"]["rate_base"] = shape_at_birth(config)
        values["growth"] |= {"stages": stages, "schedule": "wsd", "min_lr_ratio": 0.0}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def make_plan(
    recipe: Recipe,
    law: ScalingLaw,
    budget: float,
    *,
    transfer: float = TRANSFER,
    by: GrowBy = "tokens",
    largest: float | None = None,
    at_largest: bool = False,
    anytime: bool = False,
    units: float | None = None,
) -> Plan:
    """The best ladder for a budget in FLOPs.

    largest: no size beyond so many parameters; with `at_largest` the ladder must end at the largest there is.
    anytime: the ladder is near the best size from scratch at every budget on the way, not only at the end.
    units: how many tokens or images there are; a plan that would read more starts at a larger size.
    """
    if recipe.model.get("checkpoint"):
        raise BadRequestError(
            f"{recipe.path}: model.checkpoint is given, and a law knows models from scratch only; leave it out"
        )
    recipe.check_data(1)
    recipe.data.inspect(count_samples=False)
    sizes = _sizes(recipe, by, largest)
    per_step = recipe.samples_per_step(1) * recipe.data.units_per_sample
    if budget < 100 * per_step * sizes[0].flops_per_unit:
        raise BadRequestError(
            f"a budget of {budget:.3g} FLOPs is fewer than 100 steps of the smallest size, "
            f"{per_step * sizes[0].flops_per_unit:.3g} FLOPs each; choose a larger one"
        )
    if anytime and at_largest:
        raise BadRequestError(
            "a ladder to stop anywhere (anytime) cannot be told where to end (to the largest size); choose one of them"
        )

    def best_of(some: list[Size]) -> Climb:
        if anytime:
            return anytime_climb(law, some, budget, transfer)
        return best_climb(law, some, budget, transfer, last=some[-1] if at_largest else None)

    climb = best_of(sizes)
    for smallest in range(1, len(sizes)):
        if units is None or sum(rung.seen for rung in climb.rungs) <= units:
            break
        climb = best_of(sizes[smallest:])
    scratch = [climbed(law, [(size, _seen(size, budget, units))], transfer) for size in sizes]
    return Plan(recipe, by, law, transfer, per_step, climb, tuple(scratch), at_largest, anytime)


def _seen(size: Size, budget: float, units: float | None) -> float:
    seen = budget / size.flops_per_unit
    return seen if units is None else min(seen, units)


def _sizes(recipe: Recipe, by: GrowBy, largest: float | None) -> list[Size]:
    """The recipe's model and its doublings."""
    with torch.device("meta"):
        model = recipe.data.model_class(first_config(recipe))
    sizes: list[Size] = []
    while True:
        if largest is not None and model.num_parameters() > largest:
            break
        doubled = 2 ** len(sizes)
        name = f"{doubled}x tokens" if by == "tokens" else f"{model.config.num_hidden_layers} blocks"
        sizes.append(Size(name, model.num_parameters(), recipe.data.flops(model.config)[1]))
        if largest is None and len(sizes) > MOST_DOUBLINGS:
            break
        request: dict[str, Any] = {"factor": 2} if by == "tokens" else {"depth": 2 * model.config.num_hidden_layers}
        model = apply_growth(model, plan_growth(model, **request), inplace=True)
    if len(sizes) < 2:
        raise BadRequestError(
            f"the largest size is {largest:,.0f} parameters, within which the recipe's model cannot double; choose a "
            "larger one, or a smaller model"
        )
    return sizes


def _request(recipe: Recipe, by: GrowBy, before: int, after: int, grows: bool) -> dict[str, Any]:
    if not grows:
        return {}
    if by == "tokens":
        return {"factor": 2 ** (after - before)}
    return {"depth": first_config(recipe).num_hidden_layers * 2**after}


def _larger(config: TokenFormerBaseConfig, by: GrowBy, doublings: int) -> dict[str, Any]:
    """The fields of the model section of a larger size."""
    if by == "tokens":
        return {f"{role}_tokens": count * 2**doublings for role, count in config.num_tokens.items()}
    return {"num_hidden_layers": config.num_hidden_layers * 2**doublings}
