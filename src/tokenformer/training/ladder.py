"""The ladder worked out: every stage with its model, its steps and its learning rate, before the first step is made.

Enters: a recipe, the configuration of the first model, the samples of one step. Leaves: a Ladder. Growth requests are
checked on models without weights, so that a mistake in the last stage is found before the first is trained.
"""

import math
from dataclasses import dataclass, replace

import torch

from ..errors import BadRequestError
from ..growth import Growth, apply_growth, plan_growth
from ..models import TokenFormerBaseConfig
from ..pattention.functional import ACTIVATIONS
from .recipe import GrowthRecipe, Recipe, StageRecipe


@dataclass(frozen=True)
class Stage:
    """One stage. `start` is the step at which it starts; a plateau may end the stage before it early."""

    number: int
    start: int
    steps: int
    config: TokenFormerBaseConfig
    parameters: int
    flops_per_unit: float
    growth: Growth | None
    adam: str
    trains: str
    rate: float  # as a fraction of training.learning_rate

    @property
    def end(self) -> int:
        return self.start + self.steps


@dataclass(frozen=True)
class Ladder:
    """All stages, with the schedule of the learning rate over them. A step counts units: tokens or images."""

    stages: tuple[Stage, ...]
    recipe: GrowthRecipe
    unit: str
    units_per_step: int

    @property
    def schedule(self) -> str:
        return self.recipe.schedule or ("wsd" if len(self.stages) > 1 else "cosine")

    @property
    def decay_start(self) -> int | None:
        """The step before which wsd has not decayed: the place from which a ladder can be climbed further."""
        if self.schedule != "wsd":
            return None
        end = self.stages[-1].end
        decay = self.recipe.decay_steps
        steps = decay * end if decay < 1 else decay
        return end - min(max(1, round(steps)), self.stages[-1].steps)

    def learning_rate(self, step: int) -> float:
        """The learning rate at a step, as a fraction of training.learning_rate."""
        return self.stage_at(step).rate * self._scheduled(step)

    def _scheduled(self, step: int) -> float:
        warmup = self.recipe.warmup_steps
        floor = self.recipe.min_lr_ratio
        if self.schedule == "wsd":
            floor = 0.0 if floor is None else floor
            start, end = self.decay_start or 0, self.stages[-1].end
            left = min(1.0, (end - step) / max(1, end - start))
            return min(1.0, (step + 1) / max(1, warmup)) * (floor + (1 - floor) * left)
        floor = 0.1 if floor is None else floor
        stage = self.stage_at(step)
        done = step - stage.start
        if done < warmup:
            return (done + 1) / warmup
        progress = min(1.0, (done - warmup) / max(1, stage.steps - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2

    def stage_at(self, step: int) -> Stage:
        """The stage that makes step `step` (counted from 0)."""
        for stage in reversed(self.stages):
            if step >= stage.start:
                return stage
        raise AssertionError(f"step {step} is before the first stage")

    def flops(self, step: int) -> float:
        """Training FLOPs of the first `step` steps."""
        return sum(
            (min(step, following) - stage.start) * self.units_per_step * stage.flops_per_unit
            for stage, following in zip(self.stages, [*(s.start for s in self.stages[1:]), math.inf], strict=True)
            if step > stage.start
        )

    def started_at(self, number: int, step: int) -> "Ladder":
        """The ladder with stage `number` starting at `step`, and the later ones following it."""
        stages, start = list(self.stages), step
        for i in range(number - 1, len(stages)):
            stages[i] = replace(stages[i], start=start)
            start = stages[i].end
        return replace(self, stages=tuple(stages))


def build_ladder(
    recipe: Recipe, config: TokenFormerBaseConfig, samples_per_step: int, samples: int | None = None
) -> Ladder:
    """Work out every stage of a recipe. `samples` is how many there are to train on, for budgets in epochs."""
    growth, task = recipe.growth, recipe.task
    units_per_step = samples_per_step * task.units_per_sample
    requests = growth.stages or [StageRecipe(steps=_single_stage_steps(recipe))]
    with torch.device("meta"):
        model = task.model_class(config)
    stages: list[Stage] = []
    for number, request in enumerate(requests, start=1):
        step = None
        if number > 1:
            method = request.method or growth.method or ("rotate" if config.pattention_kind in ACTIVATIONS else "split")
            step = plan_growth(
                model,
                request.factor,
                num_tokens=request.num_tokens,
                to=request.to,
                method=method,
                seed=growth.seed + number,
                noise=growth.noise,
                exact=method != "random",
            )
            model = apply_growth(model, step)
        parameters = model.num_parameters()
        if growth.max_parameters and parameters > growth.max_parameters:
            raise BadRequestError(
                f"growth.stages[{number - 1}] has {parameters:,} parameters; growth.max_parameters is "
                f"{growth.max_parameters:,.0f}"
            )
        stages.append(
            Stage(
                number=number,
                start=stages[-1].end if stages else 0,
                steps=_steps(request, units_per_step, samples),
                config=model.config,
                parameters=parameters,
                flops_per_unit=task.flops(model.config)[1],
                growth=step,
                adam=request.adam or growth.adam,
                trains=(request.trains or growth.trains) if number > 1 else "all",
                rate=_rate(recipe, request, stages),
            )
        )
    return Ladder(tuple(stages), growth, task.unit, units_per_step)


def _steps(request: StageRecipe, units_per_step: int, samples: int | None) -> int:
    if request.steps is not None:
        return request.steps
    units = request.tokens or request.images
    if units is None:
        assert request.epochs is not None
        assert samples is not None
        units = request.epochs * samples
    return max(1, round(units / units_per_step))


def _rate(recipe: Recipe, request: StageRecipe, before: list[Stage]) -> float:
    if request.learning_rate is None:
        return before[-1].rate if before else 1.0
    whole = recipe.training["learning_rate"]
    if not whole > 0:
        raise BadRequestError(f"training.learning_rate is {whole}; stages with rates of their own need one above 0")
    return request.learning_rate / whole


def _single_stage_steps(recipe: Recipe) -> int:
    steps = recipe.training.get("max_steps")
    if not isinstance(steps, int) or steps < 1:
        raise BadRequestError(f"training.max_steps is {steps!r}; say how long to train, there or in growth.stages")
    return steps
