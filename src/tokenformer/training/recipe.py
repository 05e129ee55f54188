"""Recipes: what a run shall do, from a YAML file and the command line, checked before anything starts.

Enters: RECIPE.yaml with the sections model, data, training and growth, and overrides such as `training.seed=1`.
Defaults < recipe < command line. Leaves: a Recipe, or a one-line error that names the nearest valid key.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from ..data import DataConfig, ImageConfig
from ..errors import BadFileError, BadRequestError, did_you_mean, one_line
from ..growth import METHODS
from .image_task import ImageTask
from .sections import Loader, check_known, fits, said, structured
from .task import Task
from .text_task import TextTask

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
# Keys of the training section that are ours, beside those of a task.
OUR_TRAINING: dict[str, Any] = {
    "parallel": "ddp",  # or fsdp
    "global_batch": None,  # blocks or images a step over all processes; overrides per_device_train_batch_size
    "keep_checkpoints": 2,  # besides the one before the decay and every stage's model
    "ema": None,  # the decay of the weights' moving average; None: none
    "layer_decay": 1.0,  # of the learning rate from block to block; 1: none
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
    "prediction_loss_only": "nothing: validation keeps no predictions",
    "remove_unused_columns": "nothing: there are none",
}
# Keys of the training section that must be whole numbers, if there at all.
WHOLE_NUMBERS = (
    "save_steps",
    "eval_steps",
    "logging_steps",
    "keep_checkpoints",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "global_batch",
)
SECTIONS = ("name", "model", "data", "training", "growth")


@dataclass
class StageRecipe:
    """One stage: how the model grows into it (not for the first), its budget, and what differs from the ladder's."""

    factor: float | None = None
    to: str | None = None
    num_tokens: dict[str, int] | None = None
    steps: int | None = None
    tokens: float | None = None
    images: float | None = None
    epochs: float | None = None
    method: str | None = None
    adam: str | None = None
    trains: str | None = None
    learning_rate: float | None = None  # from this stage on; None: as before


@dataclass
class GrowthRecipe:
    """The ladder. Without stages the model trains for training.max_steps and does not grow."""

    stages: list[StageRecipe] = field(default_factory=list)
    method: str | None = None  # None: rotate, or split for kinds of which rotate is not exact
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

    @property
    def in_epochs(self) -> bool:
        """Whether the length of the data must be known to say how long the ladder is."""
        return any(stage.epochs is not None for stage in self.stages)


CHOICES = {
    "method": METHODS,
    "adam": ("carry", "reset"),
    "trains": ("all", "new"),
    "schedule": ("wsd", "cosine"),
    "trigger": ("budget", "plateau"),
}


# Numbers of the growth section: which are possible, and how an error says so.
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "noise": (lambda value: value >= 0, "at least 0"),
    "warmup_steps": (lambda value: value >= 0, "at least 0"),
    "decay_steps": (lambda value: value > 0, "a number of steps, or a fraction of all below 1,"),
    "min_lr_ratio": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "patience": (lambda value: value >= 1, "at least 1"),
    "min_improvement": (lambda value: value >= 0, "at least 0"),
    "max_parameters": (lambda value: value > 0, "above 0"),
}
# The same of the training section, for what torch would refuse only when training begins.
TRAINING_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "learning_rate": (lambda value: value > 0, "above 0"),
    "weight_decay": (lambda value: value >= 0, "at least 0"),
    "adam_beta1": (lambda value: 0 <= value < 1, "from 0 to below 1"),
    "adam_beta2": (lambda value: 0 <= value < 1, "from 0 to below 1"),
    "adam_epsilon": (lambda value: value > 0, "above 0"),
    "max_grad_norm": (lambda value: value >= 0, "at least 0"),
    "seed": (lambda value: 0 <= value < 2**32, "a whole number from 0 to 2**32 - 1"),
}
# Those that keep a row a token, so that their state grows as tokens do.
GROWING_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")


@dataclass
class Recipe:
    """A checked recipe."""

    name: str
    model: dict[str, Any]
    data: DataConfig | ImageConfig
    training: dict[str, Any]
    growth: GrowthRecipe

    @property
    def task(self) -> Task:
        """What is particular to the data: text or images."""
        return ImageTask(self.data) if isinstance(self.data, ImageConfig) else TextTask(self.data)

    @property
    def trainer_arguments(self) -> dict[str, Any]:
        """Those of the training section that are TrainingArguments' own."""
        ours = {*OUR_TRAINING, *self.task.settings}
        return {key: value for key, value in self.training.items() if key not in ours}

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
        given = yaml.load(path.read_text(encoding="utf-8"), Loader)
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
        dotted = {key: yaml.load(value, Loader) for key, _, value in (o.partition("=") for o in overrides)}
        config = OmegaConf.create(given)
        for key, value in dotted.items():
            try:
                OmegaConf.update(config, key, value, merge=False)
            except IndexError:
                raise BadRequestError(f"{path}: {key} was given, and that list is shorter; it counts from 0") from None
        merged = OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, TypeError, AttributeError) as error:
        raise BadRequestError(f"the overrides do not fit {path}: {one_line(error)}") from error
    assert isinstance(merged, dict)
    return _check(merged, path)


def _check(given: dict[Any, Any], path: Path) -> Recipe:
    check_known(given, SECTIONS, f"{path}", {})
    sections = {name: given.get(name) or {} for name in SECTIONS[1:]}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise BadRequestError(f"{path}: {name} is {section!r}; a section is a list of keys and values")
    if sections["growth"].get("stages") and "max_steps" in sections["training"]:
        raise BadRequestError(f"{path}: training.max_steps is given, and the budget is in growth.stages; leave it out")
    mine, other = (ImageTask, TextTask) if "images" in sections["data"] else (TextTask, ImageTask)
    data = structured(
        mine.data_class, sections["data"], f"{path}: data", _elsewhere(get_type_hints(other.data_class), mine, other)
    )
    training = _check_training(sections["training"], path, mine, other)
    growth = _check_growth(sections["growth"], path, mine, other)
    carried = [stage for stage in growth.stages[1:] if (stage.adam or growth.adam) == "carry"]
    if carried and training.get("optim", GROWING_OPTIMIZERS[0]) not in GROWING_OPTIMIZERS:
        raise BadRequestError(
            f"{path}: training.optim is {training['optim']!r}, whose state cannot grow with the tokens; choose "
            f"{' or '.join(GROWING_OPTIMIZERS)}, or let growth.adam be reset"
        )
    name, model = str(given.get("name") or path.stem), _check_model(sections["model"], path, mine, other)
    return Recipe(name=name, model=model, data=data, training=training, growth=growth)


def _elsewhere(keys: Iterable[str], mine: type[Task], other: type[Task]) -> dict[str, str]:
    """What to say of keys that the other kind of recipe has."""
    return dict.fromkeys(keys, f"is for {other.kind}, and this is {mine.kind} ({mine.mark})")


def _check_model(section: dict[str, Any], path: Path, mine: type[Task], other: type[Task]) -> dict[str, Any]:
    known, others = (
        ["preset", "checkpoint", *task.model_keys, *(f.name for f in dataclasses.fields(task.config_class))]
        for task in (mine, other)
    )
    check_known(section, known, f"{path}: model", _elsewhere(others, mine, other))
    return section


def _check_training(section: dict[str, Any], path: Path, mine: type[Task], other: type[Task]) -> dict[str, Any]:
    fields = {f.name: f for f in dataclasses.fields(TrainingArguments) if f.init}
    decided = {**DECIDED, **mine.decided}
    for key, instead in decided.items():
        if key in section:
            raise BadRequestError(f"{path}: training.{key} is decided by the ladder; use {instead}")
    known = [*OUR_TRAINING, *mine.settings, *(set(fields) - set(decided))]
    check_known(section, known, f"{path}: training", _elsewhere(other.settings, mine, other))
    training = {**TRAINING_DEFAULTS, **OUR_TRAINING, **mine.settings, **section}
    hints = get_type_hints(TrainingArguments)
    for key, value in section.items():
        if key in hints and not fits(value, hints[key]):
            raise BadRequestError(f"{path}: training.{key} is {value!r}; {said(hints[key])} is needed")
    unset = {**OUR_TRAINING, **mine.settings}
    for key in (*WHOLE_NUMBERS, *mine.settings):
        value = training.get(key, 1)
        if not (value is None and unset.get(key, 1) is None) and (not isinstance(value, int) or value < 1):
            raise BadRequestError(f"{path}: training.{key} is {value!r}; a whole number of at least 1 is needed")
    _check_ranges(training, TRAINING_RANGES, f"{path}: training")
    optimizers = [name.value for name in OptimizerNames]
    if str(training.get("optim", optimizers[0])) not in optimizers:
        hint = did_you_mean(str(training["optim"]), optimizers)
        raise BadRequestError(f"{path}: training.optim is {training['optim']!r}; {hint}")
    if training.get("bf16") and training.get("fp16"):
        raise BadRequestError(f"{path}: training.bf16 and training.fp16 are both true; choose one of them")
    if training["parallel"] not in ("ddp", "fsdp"):
        raise BadRequestError(f"{path}: training.parallel is {training['parallel']!r}; choose ddp or fsdp")
    ema, layer_decay = training["ema"], training["layer_decay"]
    if ema is not None and not (fits(ema, float) and 0 < ema < 1):
        raise BadRequestError(f"{path}: training.ema is {ema!r}; a decay above 0 and below 1 is needed, as 0.9998")
    if not (fits(layer_decay, float) and 0 < layer_decay <= 1):
        raise BadRequestError(
            f"{path}: training.layer_decay is {layer_decay!r}; above 0 and at most 1 is needed, as 0.75 (1: none)"
        )
    return training


def _check_ranges(values: dict[str, Any], ranges: dict[str, tuple[Callable[[float], bool], str]], where: str) -> None:
    """Refuse numbers that are not possible; what is not given is not looked at."""
    for key, (fits_range, wanted) in ranges.items():
        value = values.get(key)
        if value is not None and not fits_range(value):
            raise BadRequestError(f"{where}.{key} is {value}; {wanted} is needed")


def _check_growth(section: dict[str, Any], path: Path, mine: type[Task], other: type[Task]) -> GrowthRecipe:
    section = dict(section)
    stages = section.pop("stages", None) or []
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise BadRequestError(f"{path}: growth.stages is {stages!r}; a list of stages is needed")
    growth = structured(GrowthRecipe, section, f"{path}: growth")
    growth.stages = [structured(StageRecipe, stage, f"{path}: growth.stages[{i}]") for i, stage in enumerate(stages)]
    for where, holder in [("growth", growth), *((f"growth.stages[{i}]", s) for i, s in enumerate(growth.stages))]:
        for key, choices in CHOICES.items():
            value = getattr(holder, key, None)
            if value is not None and value not in choices:
                raise BadRequestError(f"{path}: {where}.{key} is {value!r}; {did_you_mean(str(value), choices)}")
    _check_ranges(vars(growth), RANGES, f"{path}: growth")
    for i, stage in enumerate(growth.stages):
        sizes = [key for key in ("factor", "to", "num_tokens") if getattr(stage, key) is not None]
        if len(sizes) != (0 if i == 0 else 1):
            rule = "the first stage has the model's own size" if i == 0 else "give one of factor, to, num_tokens"
            raise BadRequestError(f"{path}: growth.stages[{i}] has {' and '.join(sizes) or 'no size'}; {rule}")
        foreign = {key: value for key, value in vars(stage).items() if key in other.budgets and value is not None}
        check_known(foreign, mine.budgets, f"{path}: growth.stages[{i}]", _elsewhere(other.budgets, mine, other))
        budgets = {key: value for key in mine.budgets if (value := getattr(stage, key)) is not None}
        if len(budgets) != 1:
            known = f"{', '.join(mine.budgets[:-1])} and {mine.budgets[-1]}"
            raise BadRequestError(
                f"{path}: growth.stages[{i}] has {' and '.join(budgets) or 'no budget'}; give one of {known}, as "
                "steps=100, and null to the others"
            )
        for key, number in {**budgets, "learning_rate": stage.learning_rate}.items():
            if number is not None and not number > 0:
                raise BadRequestError(f"{path}: growth.stages[{i}].{key} is {number}; it must be above 0")
    if growth.trigger == "plateau" and len(growth.stages) < 2:
        raise BadRequestError(f"{path}: growth.trigger is plateau, and there is no second stage to grow into")
    return growth
