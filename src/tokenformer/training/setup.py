"""What follows from a recipe for its run: folder, first configuration, batch, and whether it is the same run.

Enters: a recipe, what is known of its data, the number of processes. Leaves: what `run` and `dry_run` need of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError

from ..errors import BadRequestError, one_line
from ..models import TokenFormerBaseConfig
from ..models.loading import read_config_of
from .recipe import Recipe, load_recipe

# Fields of the model section that no weight depends on, so that they may stand beside a checkpoint.
FREE_FIELDS = ("drop_path_rate", "attention_dropout")
# What may differ when a run is carried on: it does not change what is computed.
MAY_CHANGE = {
    "data.workers",
    "data.cache",
    "data.strict",  # a strict run has passed over no image yet
    "training.parallel",
    "training.per_device_train_batch_size",
    "training.per_device_eval_batch_size",
    "training.gradient_accumulation_steps",
    "training.global_batch",  # how many tokens a step has is checked by itself
    "training.dataloader_num_workers",
    "training.keep_checkpoints",
    "training.save_steps",
    "training.eval_steps",
    "training.logging_steps",
    "training.report_to",
    "training.output_dir",
}


def run_folder(recipe: Recipe) -> Path:
    """Where a run writes: training.output_dir, or runs/NAME."""
    return Path(recipe.training.get("output_dir") or Path("runs") / recipe.name)


def first_config(recipe: Recipe, data: Any) -> TokenFormerBaseConfig:
    """The configuration of the first stage's model. What the recipe leaves open follows from the data."""
    section, task = dict(recipe.model), recipe.task
    preset, checkpoint = section.pop("preset", None), section.pop("checkpoint", None)
    if checkpoint is not None:
        if not (Path(checkpoint) / "config.json").is_file():
            raise BadRequestError(
                f"model.checkpoint is {checkpoint}, which is not a model folder: it has no config.json"
            )
        config = read_config_of(checkpoint, task.config_class)
        free = {key: value for key, value in section.items() if key in FREE_FIELDS}
        with _in_one_line():
            for key, value in {**task.refitted(), **free}.items():
                setattr(config, key, value)
            config.validate_architecture()
    else:
        section = {**task.implied(section, data), **section}
        with _in_one_line():
            config = task.config_class.preset(preset, **section) if preset else task.config_class(**section)
    task.settle(config, data)
    return config


@contextmanager
def _in_one_line() -> Iterator[None]:
    """What is wrong with a configuration: the sentence of the innermost error, without what is around it."""
    try:
        yield
    except BadRequestError:
        raise
    except (StrictDataclassError, ValueError) as error:
        raise BadRequestError(f"model: {one_line(error).rpartition('Error: ')[2]}") from error


def passed_over(recipe: Recipe) -> list[str]:
    """The keys of the model section that a checkpoint decides instead."""
    decided = [key for key in recipe.model if key not in ("checkpoint", *FREE_FIELDS)]
    return decided if recipe.model.get("checkpoint") else []


def samples_per_step(recipe: Recipe, processes: int) -> int:
    """Blocks or images of one optimizer step over all processes."""
    return local_batch(recipe, processes) * processes * recipe.training.get("gradient_accumulation_steps", 1)


def local_batch(recipe: Recipe, processes: int) -> int:
    """Blocks or images that one process reads at a time."""
    wanted = recipe.training["global_batch"]
    if wanted is None:
        return recipe.training["per_device_train_batch_size"]
    share = processes * recipe.training.get("gradient_accumulation_steps", 1)
    if wanted % share:
        raise BadRequestError(
            f"training.global_batch is {wanted}; with {processes} processes and accumulation it must divide by {share}"
        )
    return wanted // share


def check_same_recipe(recipe: Recipe, folder: Path) -> None:
    """A run that has started is not carried on with another recipe."""
    if not (folder / "stage-1" / "start.json").exists():
        return
    # As it would be read today: keys that have come since have their defaults.
    before, now = (yaml.safe_load(one.to_yaml()) for one in (load_recipe(folder / "recipe.yaml"), recipe))
    for section in ("model", "data", "training", "growth"):
        for key in sorted({*before[section], *now[section]}):
            old, new = before[section].get(key), now[section].get(key)
            if old != new and f"{section}.{key}" not in MAY_CHANGE:
                raise BadRequestError(
                    f"{folder} was started with {section}.{key}={old!r}, and now it is {new!r}; give another "
                    "training.output_dir, or the old value"
                )
