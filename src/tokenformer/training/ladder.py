"""The ladder worked out: every stage with its model, its steps and its learning rate, before the first step is made.

Enters: a recipe and the number of processes. Leaves: a Ladder. Growth requests are checked on models without weights,
so that a mistake in the last stage is found before the first is trained. `Ladder.rate_factor` is the schedule.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import BadRequestError, one_line
from ..growth import Growth, apply_growth, plan_growth
from ..growth.group import plan_group
from ..growth.rates import base_shape
from ..models import TokenFormerBaseConfig
from ..models.kept_groups import check_name
from ..models.loading import read_config
from ..models.side_files import LOAD_IT_YOURSELF
from .nested import check_nested, check_nested_growth, mean_flops
from .recipe import Recipe, config_errors_in_one_line
from .settings import GrowthSettings, StageSettings

# Beyond this a float no longer counts by ones.
MOST_UNITS = 2**53
# Fields of the model section that no weight depends on, so that they may be given beside a checkpoint.
FIELDS_BESIDE_CHECKPOINT = ("drop_path_rate", "attention_dropout")


@dataclass(frozen=True)
class Stage:
    """One stage. It starts at step `start`, which moves forward if a plateau ends the stage before it early."""

    number: int
    start: int
    steps: int
    config: TokenFormerBaseConfig
    parameters: int
    flops_per_unit: float
    growth: Growth | None
    adam: str
    trains: str
    rate_factor: float  # a multiple of training.learning_rate

    @property
    def end(self) -> int:
        return self.start + self.steps


@dataclass(frozen=True)
class Ladder:
    """All stages, with the schedule of the learning rate over them. A step counts units: tokens or images.

    `rate_base` is the shape at which every parameter has the scheduled rate, if rates follow sizes (growth/rates.py).
    """

    stages: tuple[Stage, ...]
    settings: GrowthSettings
    unit: str
    units_per_step: int
    rate_base: dict[str, int]

    @property
    def schedule(self) -> str:
        assert self.settings.schedule is not None  # GrowthSettings has decided
        return self.settings.schedule

    @property
    def decay_start(self) -> int | None:
        """The step before which wsd has not decayed: the place from which a ladder can be climbed further."""
        if self.schedule != "wsd":
            return None
        end = self.stages[-1].end
        decay = self.settings.decay_steps
        steps = decay * end if decay < 1 else decay
        return end - min(max(1, round(steps)), self.stages[-1].steps)

    def rate_factor(self, step: int) -> float:
        """The learning rate at a step, as a multiple of training.learning_rate."""
        return self.stage_at(step).rate_factor * self._scheduled(step)

    def _scheduled(self, step: int) -> float:
        warmup = self.settings.warmup_steps
        floor = self.settings.min_lr_ratio or 0.0
        if self.schedule == "wsd":
            start, end = self.decay_start or 0, self.stages[-1].end
            left = min(1.0, (end - step) / max(1, end - start))
            return min(1.0, (step + 1) / max(1, warmup)) * (floor + (1 - floor) * left)
        stage = self.stage_at(step)
        done = step - stage.start
        if done < warmup:
            return (done + 1) / warmup
        progress = min(1.0, (done - warmup) / max(1, stage.steps - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2

    @property
    def warning(self) -> str | None:
        """What is allowed but probably a mistake."""
        warmup = self.settings.warmup_steps
        # With wsd one warm-up for the ladder, with cosine one for every stage.
        shortest = self.stages[-1].end if self.schedule == "wsd" else min(stage.steps for stage in self.stages)
        if warmup < shortest:
            return None
        return (
            f"growth.warmup_steps is {warmup:,}, and there are {shortest:,} steps: the learning rate never reaches "
            "training.learning_rate"
        )

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


def build_ladder(recipe: Recipe, processes: int) -> Ladder:
    """Work out every stage of a recipe. For budgets in epochs the data must have been counted."""
    growth, data, config = recipe.growth, recipe.data, first_config(recipe)
    check_nested(recipe, config, processes)
    units_per_step = recipe.samples_per_step(processes) * data.units_per_sample
    requests = growth.stages or [growth.only_stage(_single_stage_steps(recipe))]
    with torch.device("meta"):
        model = data.model_class(config)
    try:
        rate_base = base_shape(model, recipe.training.rate_base)
    except BadRequestError as error:
        raise BadRequestError(f"{recipe.path}: training.rate_base: {error}") from error
    stages: list[Stage] = []
    for number, request in enumerate(requests, start=1):
        planned = None
        if request.group is not None:
            planned = _planned_group(recipe, model, request, number)
            model = apply_growth(model, planned)
        elif number > 1:
            method = request.method or growth.method or config.growth_method
            check_nested_growth(recipe, method, f"{recipe.path}: growth.stages[{number - 1}]")
            try:
                planned = plan_growth(
                    model,
                    request.factor,
                    num_tokens=request.num_tokens,
                    to=request.to,
                    depth=request.depth,
                    new_blocks=request.new_blocks or growth.new_blocks,
                    new_blocks_at=request.new_blocks_at or growth.new_blocks_at,
                    method=method,
                    seed=growth.seed + number,
                    noise=growth.noise,
                    exact=method != "random",
                )
            except BadRequestError as error:
                reason = str(error).removeprefix("grow: ")
                raise BadRequestError(f"{recipe.path}: growth.stages[{number - 1}]: {reason}") from error
            model = apply_growth(model, planned)
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
                steps=_steps(request, units_per_step, recipe),
                config=model.config,
                parameters=parameters,
                flops_per_unit=mean_flops(recipe, model.config, processes)[1],
                growth=planned,
                adam=request.adam or growth.adam,
                trains=_trains(recipe, request, number),
                rate_factor=_rate_factor(recipe, request, stages),
            )
        )
        if stages[-1].end * units_per_step > MOST_UNITS:
            raise BadRequestError(
                f"growth.stages[{number - 1}] ends at step {stages[-1].end:.3g}, after more {data.unit} than can be "
                "counted; choose a smaller budget"
            )
    return Ladder(tuple(stages), growth, data.unit, units_per_step, rate_base)


def _planned_group(recipe: Recipe, model: Any, request: StageSettings, number: int) -> Growth:
    where = f"{recipe.path}: growth.stages[{number - 1}]"
    if number == 1 and recipe.model.get("checkpoint") is None:
        raise BadRequestError(
            f"{where}: a group is all that it trains, and the model is new; give model.checkpoint, or train it first"
        )
    assert request.group is not None
    assert request.num_tokens is not None
    try:
        check_name(model, request.group)
        return plan_group(model, request.group, request.num_tokens, seed=recipe.growth.seed + number)
    except BadRequestError as error:
        raise BadRequestError(f"{where}: {str(error).removeprefix('grow: ')}") from error


def _trains(recipe: Recipe, request: StageSettings, number: int) -> str:
    if request.group is not None:
        return "new"
    return (request.trains or recipe.growth.trains) if number > 1 else "all"


def first_config(recipe: Recipe) -> TokenFormerBaseConfig:
    """The configuration of the first stage's model. What the recipe leaves open follows from the data."""
    section, data = dict(recipe.model), recipe.data
    preset, checkpoint = section.pop("preset", None), section.pop("checkpoint", None)
    if checkpoint is not None:
        if not (Path(checkpoint) / "config.json").is_file():
            raise BadRequestError(
                f"model.checkpoint is {checkpoint}, which is not a model folder: it has no config.json"
            )
        config = read_config(checkpoint, data.config_class, foreign_code=LOAD_IT_YOURSELF)
        with config_errors_in_one_line(recipe.path):
            data.adjust_checkpoint_config(config)
            for key in FIELDS_BESIDE_CHECKPOINT:
                if key in section:
                    setattr(config, key, section[key])
            config.validate()
    else:
        with config_errors_in_one_line(recipe.path):
            config = _new_config(recipe, preset, {**data.config_fields(section), **section})
    data.adjust_config(config)
    return config


def _new_config(recipe: Recipe, preset: str | None, fields: dict[str, Any]) -> TokenFormerBaseConfig:
    kind = recipe.data.config_class
    try:
        return kind.preset(preset, **fields) if preset else kind(**fields)
    except BadRequestError as error:  # only of the preset's name
        raise BadRequestError(f"{recipe.path}: model.preset: {error}") from error
    except ValueError as error:  # what transformers' own constructor says of id2label and problem_type
        raise BadRequestError(f"{recipe.path}: model: {one_line(error)}") from error


def ignored_model_keys(recipe: Recipe) -> list[str]:
    """The keys of the model section that a checkpoint decides instead."""
    decided = [key for key in recipe.model if key not in ("checkpoint", *FIELDS_BESIDE_CHECKPOINT)]
    return decided if recipe.model.get("checkpoint") else []


def _steps(request: StageSettings, units_per_step: int, recipe: Recipe) -> int:
    if request.steps is not None:
        return request.steps
    (budget,) = (key for key in request.budgets if getattr(request, key) is not None)
    units = getattr(request, budget) * (len(recipe.data.train) if budget == "epochs" else 1)
    return max(1, round(units / units_per_step))


def _rate_factor(recipe: Recipe, request: StageSettings, before: list[Stage]) -> float:
    if request.learning_rate is None:
        return before[-1].rate_factor if before else 1.0
    return request.learning_rate / recipe.training.learning_rate


def _single_stage_steps(recipe: Recipe) -> int:
    if recipe.training.max_steps is None:
        raise BadRequestError("training.max_steps is not given; set it, or give growth.stages")
    return recipe.training.max_steps
