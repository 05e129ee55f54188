"""A token group trained beside a causal language model that is no TokenFormer: one stage, in which nothing grows.

Enters: a recipe whose only stage trains a group, and whose model.checkpoint is a folder of transformers. Leaves: the
model with the group, and a run as run.py lays it out, but with the group alone in its checkpoints. The same recipe goes
on from the newest good one.
"""

from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, set_seed

from ..errors import BadRequestError
from ..groups import add_tokens
from ..groups.files import WEIGHTS_FILE
from ..io import remove_partials, replace_file
from ..models.loading import read_model
from .callbacks import Bar, Metrics, Signals
from .checkpoint import checkpoint_step, last_good
from .ladder import Ladder, Stage
from .recipe import Recipe, check_same_recipe
from .run import StoppedError, run_lock
from .trainer import LadderTrainer, stage_folder, trainer_arguments

# What a ladder can do besides, and the value with which it does not.
PLAIN = {"ema": None, "nested": None, "parallel": "ddp", "rates": "equal", "optimizer": "adamw"}


def train_beside(recipe: Recipe, console: Console | None = None) -> Any:
    """Train the group, or carry the run on; returns the model with the group beside it."""
    console = console or Console(stderr=True)
    processes = PartialState(cpu=not torch.cuda.is_available())
    _check(recipe, processes.num_processes)
    (settings,) = recipe.growth.stages
    assert settings.group is not None
    model = read_model(recipe.model["checkpoint"], auto=AutoModelForCausalLM)
    _check_vocabulary(recipe, model)
    add_tokens(model, settings.group, settings.num_tokens or {}, seed=recipe.growth.seed + 1)
    with run_lock(recipe.folder, processes):
        check_same_recipe(recipe, recipe.folder)
        with processes.main_process_first():
            recipe.data.prepare(console if processes.is_main_process else Console(quiet=True))
        _check_vocabulary(recipe, model)  # of a tokenizer that had to be fetched
        if processes.is_main_process:
            _start(recipe)
        processes.wait_for_everyone()
        _train(recipe, model, _ladder(recipe, model, processes.num_processes), console)
    return model


def _check(recipe: Recipe, processes: int) -> None:
    """Refuse what can be refused without the model and the data."""
    stages = recipe.growth.stages
    if len(stages) != 1 or stages[0].group is None or stages[0].steps is None:
        raise BadRequestError(
            f"{recipe.path}: growth.stages is not one group with its steps, and no other stage is possible for a model "
            "that is no TokenFormer; leave it out"
        )
    for key, only in PLAIN.items():
        given = getattr(recipe.training, key)
        if given != only:
            raise BadRequestError(
                f"training.{key} is {given!r}, which only TokenFormers are trained with; leave it out"
            )
    recipe.check_data(processes)
    recipe.data.inspect(count_samples=False)
    trainer_arguments(recipe, stage=1, steps=1)


def _check_vocabulary(recipe: Recipe, model: Any) -> None:
    entries, rows = getattr(recipe.data, "vocab_size", None) or 0, model.get_input_embeddings().weight.shape[0]
    if entries > rows:
        raise BadRequestError(
            f"the tokenizer has {entries:,} entries, and the model in {recipe.model['checkpoint']} {rows:,}; give its "
            "own tokenizer, as data.tokenizer=FOLDER"
        )


def _start(recipe: Recipe) -> None:
    """Note what later starts are compared with."""
    folder = stage_folder(recipe, 1)
    folder.mkdir(parents=True, exist_ok=True)
    remove_partials(folder)
    if not (folder / "start.json").exists():
        replace_file(recipe.folder / "recipe.yaml", recipe.to_yaml())
        replace_file(folder / "start.json", '{"step": 0}\n')


def _ladder(recipe: Recipe, model: Any, processes: int) -> Ladder:
    """The one stage, for what the trainer asks of a ladder: steps, the learning rate, and what is shown."""
    (settings,) = recipe.growth.stages
    units = recipe.samples_per_step(processes) * recipe.data.units_per_sample
    assert settings.steps is not None
    # Forward, and backward through what is frozen, without gradients of it.
    flops = 4.0 * model.num_parameters()
    stage = Stage(
        number=1,
        start=0,
        steps=settings.steps,
        config=model.config,
        parameters=model.num_parameters(),
        flops_per_unit=flops,
        growth=None,
        adam="reset",
        trains="new",
        rate_factor=1.0,
    )
    return Ladder((stage,), recipe.growth, recipe.data.unit, units, {})


def _train(recipe: Recipe, model: Any, ladder: Ladder, console: Console) -> None:
    (stage,) = ladder.stages
    good, problems = last_good(stage_folder(recipe, 1))
    for problem in problems:
        console.print(f"warning: {problem}; {good.name if good else 'the beginning'} is used", soft_wrap=True)
    step = 0
    if good is not None:
        step = checkpoint_step(good)
        model.load_state_dict(load_file(good / WEIGHTS_FILE), strict=False)
    if step >= stage.end:
        return
    set_seed(recipe.training.seed)
    signals, metrics = Signals(), Metrics(recipe.folder / "metrics.jsonl", ladder)
    metrics.forget_after(1, step)
    place = good or stage_folder(recipe, 1) / "checkpoint-0"
    trainer = LadderTrainer(recipe, ladder, stage, model, place, [metrics, signals, Bar(console, ladder, metrics)])
    with signals.listening():
        trainer.train(resume_from_checkpoint=None if good is None else str(good))
    if signals.received is not None:
        raise StoppedError(signals.received)
