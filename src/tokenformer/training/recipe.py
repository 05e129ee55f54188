"""Recipes: what a run shall do, from a YAML file and the command line, checked before anything starts.

Enters: RECIPE.yaml with the sections model, data, training and growth, and overrides such as `training.seed=1`.
Defaults < recipe < command line. Leaves: a Recipe, or a one-line error that names the nearest valid key.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import TrainingArguments

from ..data import DataConfig
from ..errors import BadFileError, BadRequestError, did_you_mean, one_line
from ..growth import METHODS
from ..models import TokenFormerConfig

# What differs from TrainingArguments' own defaults: the paper's optimizer, and nothing reported to anyone unasked.
TRAINING_DEFAULTS: dict[str, Any] = {
    "learning_rate": 6e-4,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "logging_steps": 10,
    "eval_steps": 100,
    "save_steps": 100,
    "seed": 0,
    "report_to": "none",
}
# Keys of the training section that are ours.
OUR_TRAINING = {
    "parallel": "ddp",  # or fsdp
    "global_batch": None,  # blocks a step over all processes; overrides per_device_train_batch_size
    "validation_blocks": 256,  # the most that one validation looks at
    "keep_checkpoints": 2,  # besides the one before the decay and every stage's model
}
# Fields of TrainingArguments that the ladder decides, and what to say instead.
DECIDED = {
    "lr_scheduler_type": "growth.schedule",
    "lr_scheduler_kwargs": "growth.schedule",
    "warmup_steps": "growth.warmup_steps",
    "warmup_ratio": "growth.warmup_steps",
    "num_train_epochs": "training.max_steps",
    "save_strategy": "training.save_steps",
    "eval_strategy": "training.eval_steps",
    "logging_strategy": "training.logging_steps",
    "save_total_limit": "training.keep_checkpoints",
    "fsdp": "training.parallel=fsdp",
    "fsdp_config": "training.parallel=fsdp",
    "resume_from_checkpoint": "the same command again: it carries on by itself",
    "train_sampling_strategy": "data.seed",
    "use_cpu": "CUDA_VISIBLE_DEVICES= to hide the GPUs",
    "load_best_model_at_end": "the stages' models",
    "disable_tqdm": "a log file instead of a terminal",
    "ignore_data_skip": "data.streaming",
    "prediction_loss_only": "nothing: validation is the loss",
    "remove_unused_columns": "nothing: there are none",
}
SECTIONS = ("name", "model", "data", "training", "growth")


@dataclass
class StageRecipe:
    """One stage: how the model grows into it (not for the first), its budget, and what differs from the ladder's."""

    factor: float | None = None
    to: str | None = None
    num_tokens: dict[str, int] | None = None
    steps: int | None = None
    tokens: float | None = None
    method: str | None = None
    adam: str | None = None
    trains: str | None = None


@dataclass
class GrowthRecipe:
    """The ladder. Without stages the model trains for training.max_steps and does not grow."""

    stages: list[StageRecipe] = field(default_factory=list)
    method: str | None = None  # None: rotate, or split where Pattention is not l2_gelu
    noise: float = 1.0
    seed: int = 0
    adam: str = "carry"
    trains: str = "all"
    schedule: str | None = None  # wsd, or cosine for each stage; None: wsd for a ladder, cosine without growth
    warmup_steps: int = 100
    decay_steps: float = 0.2  # of wsd: steps, or a fraction of the whole ladder
    min_lr_ratio: float | None = None  # None: 0.1 for cosine, 0 for wsd
    trigger: str = "budget"  # or plateau
    patience: int = 3
    min_improvement: float = 0.002
    max_parameters: float | None = None


CHOICES = {
    "method": METHODS,
    "adam": ("carry", "reset"),
    "trains": ("all", "new"),
    "schedule": ("wsd", "cosine"),
    "trigger": ("budget", "plateau"),
}


@dataclass
class Recipe:
    """A checked recipe."""

    name: str
    model: dict[str, Any]
    data: DataConfig
    training: dict[str, Any]
    growth: GrowthRecipe

    def to_yaml(self) -> str:
        """The resolved recipe, as it is kept beside the checkpoints."""
        resolved = {section: getattr(self, section) for section in SECTIONS}
        resolved["data"] = dataclasses.asdict(self.data)
        resolved["growth"] = dataclasses.asdict(self.growth)
        return yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file and apply `section.key=value` overrides to it."""
    path = Path(path)
    try:
        given = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise BadRequestError(f"{path} does not exist; give the path of a recipe, as recipes/demo.yaml") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadFileError(f"{path} is not a readable recipe: {one_line(error)}") from error
    if not isinstance(given, dict):
        raise BadFileError(f"{path} holds no sections; a recipe has model, data, training and growth")
    overrides = list(overrides)
    for override in overrides:
        if not re.match(r"^[\w.\[\]]+=", override):
            raise BadRequestError(f"{override!r} is not an override; write section.key=value, as training.seed=1")
    try:
        dotted = {key: yaml.load(value, _Loader) for key, _, value in (o.partition("=") for o in overrides)}
        config = OmegaConf.create(given)
        for key, value in dotted.items():
            OmegaConf.update(config, key, value, merge=False)
        merged = OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, TypeError, AttributeError) as error:
        raise BadRequestError(f"the overrides do not fit {path}: {one_line(error)}") from error
    assert isinstance(merged, dict)
    return _check(merged, path)


def _check(given: dict[Any, Any], path: Path) -> Recipe:
    _known(given, SECTIONS, f"{path}")
    sections = {name: given.get(name) or {} for name in SECTIONS[1:]}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise BadRequestError(f"{path}: {name} is {section!r}; a section is a list of keys and values")
    if sections["growth"].get("stages") and "max_steps" in sections["training"]:
        raise BadRequestError(f"{path}: training.max_steps is given, and the budget is in growth.stages; leave it out")
    return Recipe(
        name=str(given.get("name") or path.stem),
        model=_check_model(sections["model"], path),
        data=_structured(DataConfig, sections["data"], f"{path}: data"),
        training=_check_training(sections["training"], path),
        growth=_check_growth(sections["growth"], path),
    )


def _check_model(section: dict[str, Any], path: Path) -> dict[str, Any]:
    fields = [f.name for f in dataclasses.fields(TokenFormerConfig)]
    _known(section, ["preset", "checkpoint", *fields], f"{path}: model")
    return section


def _check_training(section: dict[str, Any], path: Path) -> dict[str, Any]:
    fields = {f.name: f for f in dataclasses.fields(TrainingArguments) if f.init}
    for key, instead in DECIDED.items():
        if key in section:
            raise BadRequestError(f"{path}: training.{key} is decided by the ladder; use {instead}")
    _known(section, [*OUR_TRAINING, *(set(fields) - set(DECIDED))], f"{path}: training")
    training = {**TRAINING_DEFAULTS, **OUR_TRAINING, **section}
    for key in ("save_steps", "eval_steps", "logging_steps", "keep_checkpoints", "validation_blocks"):
        if not isinstance(training[key], int) or training[key] < 1:
            raise BadRequestError(
                f"{path}: training.{key} is {training[key]!r}; a whole number of at least 1 is needed"
            )
    hints = get_type_hints(TrainingArguments)
    for key, value in section.items():
        if key in hints and not _fits(value, hints[key]):
            raise BadRequestError(f"{path}: training.{key} is {value!r}; {_said(fields[key].type)} is needed")
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch"):
        value = training.get(key, 1)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise BadRequestError(f"{path}: training.{key} is {value!r}; a whole number of at least 1 is needed")
    if training["parallel"] not in ("ddp", "fsdp"):
        raise BadRequestError(f"{path}: training.parallel is {training['parallel']!r}; choose ddp or fsdp")
    return training


def _check_growth(section: dict[str, Any], path: Path) -> GrowthRecipe:
    section = dict(section)
    stages = section.pop("stages", None) or []
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise BadRequestError(f"{path}: growth.stages is {stages!r}; a list of stages is needed")
    growth = _structured(GrowthRecipe, section, f"{path}: growth")
    growth.stages = [_structured(StageRecipe, stage, f"{path}: growth.stages[{i}]") for i, stage in enumerate(stages)]
    for where, holder in [("growth", growth), *((f"growth.stages[{i}]", s) for i, s in enumerate(growth.stages))]:
        for key, choices in CHOICES.items():
            value = getattr(holder, key, None)
            if value is not None and value not in choices:
                raise BadRequestError(f"{path}: {where}.{key} is {value!r}; {did_you_mean(str(value), choices)}")
    for i, stage in enumerate(growth.stages):
        sizes = [key for key in ("factor", "to", "num_tokens") if getattr(stage, key) is not None]
        if len(sizes) != (0 if i == 0 else 1):
            rule = "the first stage has the model's own size" if i == 0 else "give one of factor, to, num_tokens"
            raise BadRequestError(f"{path}: growth.stages[{i}] has {' and '.join(sizes) or 'no size'}; {rule}")
        if (stage.steps is None) == (stage.tokens is None):
            raise BadRequestError(f"{path}: growth.stages[{i}] needs a budget: one of steps and tokens")
        budget = stage.steps if stage.tokens is None else stage.tokens
        if not budget > 0:
            raise BadRequestError(f"{path}: growth.stages[{i}] has a budget of {budget}; it must be above 0")
    if growth.trigger == "plateau" and len(growth.stages) < 2:
        raise BadRequestError(f"{path}: growth.trigger is plateau, and there is no second stage to grow into")
    return growth


def _known(section: Mapping[Any, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in section:
        if key not in known:
            raise BadRequestError(f"{where}: {key!r} is not known; {did_you_mean(str(key), known)}")


def _structured(cls: Any, section: Mapping[str, Any], where: str) -> Any:
    """An instance of a dataclass, with the type of every value checked. omegaconf's own check knows no `str | list`."""
    hints = get_type_hints(cls)
    _known(section, hints, where)
    for key, value in section.items():
        if not _fits(value, hints[key]):
            raise BadRequestError(f"{where}.{key} is {value!r}; {_said(cls.__annotations__[key])} is needed")
    return cls(**section)


def _said(annotation: Any) -> str:
    return str(annotation).replace("<class '", "").replace("'>", "")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from YAML is of a type. A whole number will do for a float."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return any(_fits(value, choice) for choice in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(item, get_args(hint)[1]) for item in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    # Types that YAML has not, such as enumerations, are left to whoever takes them.
    return isinstance(value, hint) if hint in (str, bool, dict, list, type(None)) else True


class _Loader(yaml.SafeLoader):
    """YAML that reads 6e-4 and 2e9 as numbers: the standard wants a point in them."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)
