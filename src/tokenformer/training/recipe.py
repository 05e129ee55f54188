"""Recipes: what a run should do, from a YAML file and the command line, checked before anything starts.

Enters: RECIPE.yaml with the sections model, data, training and growth, and overrides such as `training.seed=1`.
Defaults < recipe < command line. Leaves: a Recipe, or a one-line error that names the nearest valid key.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError

from ..data.base import TrainingData
from ..errors import BadFileError, BadRequestError, did_you_mean, innermost, shown
from ..schema import Section
from .muon import check_muon
from .recipe_file import override, read_values
from .settings import (
    ADAMW,
    GROWING_OPTIMIZERS,
    GrowthSettings,
    ImageGrowth,
    ImageModel,
    ImageTraining,
    TextGrowth,
    TextModel,
    TextTraining,
    TrainingSettings,
)

# Keys of the data section on which the model depends.
FIXED_IN_STAGES = ("tokenizer", "eos_token", "block_length", "images")
SECTIONS = ("name", "model", "data", "training", "growth")
# What may differ when a run is resumed: it does not change what is computed.
MAY_CHANGE = {
    "data.workers",
    "data.cache",
    "data.strict",  # a strict run has passed over no image yet
    "training.parallel",
    "training.per_device_train_batch_size",
    "training.per_device_eval_batch_size",
    "training.gradient_accumulation_steps",
    "training.global_batch",  # tokens per step are checked separately
    "training.dataloader_num_workers",
    "training.dataloader_pin_memory",
    "training.dataloader_persistent_workers",
    "training.dataloader_prefetch_factor",
    "training.keep_checkpoints",
    "training.save_steps",
    "training.eval_steps",  # unless a plateau, which is seen at validations, ends stages
    "training.logging_steps",
    "training.report_to",
    "training.run_name",
    "training.log_level",
    "training.output_dir",
    "training.license",
    "training.push_to_hub",  # never kept: it is said on the command line every time
}
# Of keys that have come since: what runs did before, where that is not today's default. They are resumed in that way.
DEFAULTS_OF_OLD_RUNS: dict[tuple[str, str], Any] = {("training", "rates"): "equal", ("growth", "new_token_warmup"): 0}


@dataclass
class Recipe:
    """A checked recipe. The model section holds what was given; `data` is not read until it is prepared."""

    path: Path  # of the file, which errors name
    name: str
    model: dict[str, Any]
    data: TrainingData
    training: TrainingSettings
    growth: GrowthSettings
    data_of_stages: dict[int, TrainingData]  # of those that have their own, by number

    def data_of(self, stage: int) -> TrainingData:
        """What a stage trains on."""
        return self.data_of_stages.get(stage, self.data)

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.training.output_dir or Path("runs") / self.name)

    def batch_per_process(self, processes: int) -> int:
        """Blocks or images that one process reads at a time."""
        wanted = self.training.global_batch
        if wanted is None:
            return self.training.per_device_train_batch_size
        share = processes * self.training.gradient_accumulation_steps
        if wanted % share:
            raise BadRequestError(
                f"training.global_batch is {wanted}; with {processes} processes and accumulation it must be divisible "
                f"by {share}"
            )
        return wanted // share

    def samples_per_step(self, processes: int) -> int:
        """Blocks or images of one optimizer step over all processes."""
        return self.batch_per_process(processes) * processes * self.training.gradient_accumulation_steps

    def check_data(self, processes: int) -> None:
        """Refuse what the data cannot do, before it is read."""
        for data in (self.data, *self.data_of_stages.values()):
            data.check(self.batch_per_process(processes), self.training.dataloader_num_workers or 0)

    def resolved(self) -> dict[str, Any]:
        """All sections with their defaults."""
        return {
            "name": self.name,
            "model": self.model,
            "data": self.data.settings.model_dump(),
            "training": {k: v for k, v in self.training.resolved().items() if k != "push_to_hub"},
            "growth": self.growth.model_dump(),
        }

    def to_yaml(self) -> str:
        """The resolved recipe, as it is kept beside the checkpoints."""
        return yaml.safe_dump(self.resolved(), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, overrides: Iterable[str] = (), values: dict[Any, Any] | None = None) -> Recipe:
    """Read a recipe file and apply `section.key=value` overrides to it.

    `values` are taken in place of a file's. `path` is then what errors and the run are called by.
    """
    path, overrides = Path(path), list(overrides)
    recipe = _check(override(read_values(path) if values is None else values, overrides, path), path)
    asked = any(given.startswith(("training.push_to_hub=", "training=")) for given in overrides)
    if getattr(recipe.training, "push_to_hub", None) and not asked:
        raise BadRequestError(
            f"{path}: training.push_to_hub is true, and a file does not decide what is published; write it on the "
            "command line: training.push_to_hub=true"
        )
    return recipe


def check_same_recipe(recipe: Recipe, folder: Path) -> None:
    """A run that has started is not resumed with another recipe."""
    if not (folder / "stage-1" / "start.json").exists():
        return
    kept = folder / "recipe.yaml"
    if not kept.exists():
        raise BadFileError(
            f"{kept} is missing, so the run cannot be checked against the recipe it was started with; restore it, "
            "or start a new run in another training.output_dir"
        )
    # As it would be read today: keys that have come since have their defaults, or what was done before they came.
    values = read_values(kept)
    missing = {key: old for key, old in DEFAULTS_OF_OLD_RUNS.items() if key[1] not in (values.get(key[0]) or {})}
    for (section, key), old in missing.items():
        settings: Section = getattr(recipe, section)
        if key not in settings.model_fields_set:
            setattr(settings, key, old)
    given = [f"{section}.{key}={old}" for (section, key), old in missing.items()]
    before, now = load_recipe(kept, given).resolved(), recipe.resolved()
    for section in SECTIONS[1:]:
        for key in sorted({*before[section], *now[section]}):
            old, new = before[section].get(key), now[section].get(key)
            may_change = MAY_CHANGE - {"training.eval_steps"} if recipe.growth.trigger == "plateau" else MAY_CHANGE
            if old != new and f"{section}.{key}" not in may_change:
                where, old, new = _difference(f"{section}.{key}", old, new)
                raise BadRequestError(
                    f"{folder} was started with {where}={shown(old)}, and now it is {shown(new)}; choose another "
                    "training.output_dir, or restore the old value"
                )


def _difference(where: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """The innermost place at which two values differ, and what stands there."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(old, new, strict=True))]
    elif isinstance(old, dict) and isinstance(new, dict):
        pairs = [(f"{where}.{key}", old.get(key), new.get(key)) for key in {**old, **new}]
    else:
        return where, old, new
    return next((_difference(*pair) for pair in pairs if pair[1] != pair[2]), (where, old, new))


def _check(given: dict[Any, Any], path: Path) -> Recipe:
    for key in given:
        if key not in SECTIONS:
            raise BadRequestError(f"{path}: {key!r} is not known; {did_you_mean(str(key), SECTIONS)}")
    sections = {name: {} if given.get(name) is None else given[name] for name in SECTIONS[1:]}

    def read(kind: type[Section], name: str) -> Any:
        return kind.read(sections[name], f"{path}: {name}")

    data: TrainingData
    kinds: tuple[type[Section], type[TrainingSettings], type[GrowthSettings]]
    if isinstance(sections["data"], dict) and "images" in sections["data"]:
        from ..data.images import ImageData, ImageSettings  # not for a run on text

        data, kinds = ImageData(read(ImageSettings, "data")), (ImageModel, ImageTraining, ImageGrowth)
    else:
        from ..data.text import TextData, TextSettings

        data, kinds = TextData(read(TextSettings, "data")), (TextModel, TextTraining, TextGrowth)
    model, training, growth = read(kinds[0], "model"), read(kinds[1], "training"), read(kinds[2], "growth")
    if growth.stages and training.max_steps is not None:
        raise BadRequestError(f"{path}: training.max_steps is given, and the budget is in growth.stages; leave it out")
    if training.optimizer == "muon":
        check_muon()
        if (training.optim or ADAMW[0]) not in ADAMW:
            raise BadRequestError(
                f"{path}: training.optimizer is muon, beside which adamw has the rest, and training.optim is "
                f"{training.optim!r}; leave one of them out"
            )
    if growth.carries_adam and (training.optim or GROWING_OPTIMIZERS[0]) not in GROWING_OPTIMIZERS:
        raise BadRequestError(
            f"{path}: training.optim is {training.optim!r}, whose state a ladder does not carry across growth; choose "
            f"{' or '.join(GROWING_OPTIMIZERS)}, or let growth.adam be reset"
        )
    if growth.method is None and len(growth.stages) > 1 and model.checkpoint is None:  # which is read later
        kind = {"pattention_kind": model.pattention_kind} if model.pattention_kind else {}
        with config_errors_in_one_line(path):
            growth.method = data.config_class(**kind).growth_method
    name = _name(given.get("name"), path)
    own = {
        number: _data_of_stage(stage.data, sections["data"], f"{path}: growth.stages[{number - 1}].data", data)
        for number, stage in enumerate(growth.stages, start=1)
        if stage.data is not None
    }
    return Recipe(path, name, model.model_dump(exclude_unset=True), data, training, growth, own)


def _data_of_stage(given: dict[str, Any], base: dict[str, Any], where: str, data: TrainingData) -> TrainingData:
    """The recipe's data with the keys that a stage changes. What is held out of the one is not taken for the other."""
    if data.unit != "tokens":
        raise BadRequestError(f"{where}: only stages that train on text may have data of their own; leave it out")
    for key in given:
        if key in FIXED_IN_STAGES:
            raise BadRequestError(f"{where}: {key} is given, and the model has one for all stages; leave it out")
    from ..data.text import TextData, TextSettings

    inherited = {key: value for key, value in base.items() if key not in ("validation", "split")}
    return TextData(TextSettings.read({**inherited, **given}, where))


def _name(given: Any, path: Path) -> str:
    """The name of the run, which is that of a folder."""
    name = path.stem if given is None else str(given)
    if not name.strip(". ") or not name.isprintable() or any(sign in name for sign in "/\\") or len(name) > 200:
        raise BadRequestError(
            f"{path}: name is {shown(given if given is not None else name)}; it names one folder inside runs/, without "
            "slashes; for another place set training.output_dir"
        )
    return name


@contextmanager
def config_errors_in_one_line(path: Path) -> Iterator[None]:
    """Of what a configuration says of a recipe's values, the innermost error's sentence."""
    try:
        yield
    except StrictDataclassError as error:
        raise BadRequestError(f"{path}: model: {innermost(error)}") from error
