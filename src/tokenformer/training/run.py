"""One run, from a recipe to the last stage's model: carried on from wherever it stands.

    RUN/recipe.yaml          the resolved recipe
    RUN/metrics.jsonl        measurements over the whole run
    RUN/stage-1/checkpoint-N the state of training at step N; the newest few are kept
    RUN/stage-1/model        the stage's model, an ordinary folder with its tokenizer or image processor
    RUN/stage-1/result.json  what the stage ended with

Everything a run needs to go on is in these files, each of which appears whole or not at all, so that the same command
carries on after any end.
"""

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from transformers import TrainerControl, TrainerState, set_seed

from ..errors import BadFileError, BadRequestError
from ..files import replace_file
from ..models.loading import read_tokenformer
from .average import FILE as AVERAGE_FILE
from .average import averaged_model
from .callbacks import Metrics, Signals
from .checkpoint import checkpoint_step, checkpoints, last_good, new_checkpoint, remove_partials
from .grow_checkpoint import grow_checkpoint
from .ladder import Ladder, Stage, build_ladder
from .lock import run_lock
from .measure import check_growth, validation_names
from .optimizer_state import FILE as OPTIMIZER_FILE
from .parallel import load_model, say_what_is_parallel
from .recipe import Recipe
from .setting import Setting, stage_folder
from .setup import check_same_recipe, first_config, local_batch, passed_over, run_folder, samples_per_step
from .trainer import LadderTrainer


class StoppedError(Exception):
    """A signal asked the run to stop, and its state is saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__("a checkpoint is written; the same command carries on")
        self.exit_code = 128 + signal_number


def train(recipe: Recipe, console: Console | None = None) -> Path:
    """Run a recipe to its end, or carry it on; returns the folder of the last stage's model."""
    console = console or Console(stderr=True)
    # The first process may prepare data for hours while the others wait.
    processes = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=7))
    folder, task = run_folder(recipe), recipe.task
    task.check(recipe.training, local_batch(recipe, processes.num_processes))
    with run_lock(folder, processes):
        check_same_recipe(recipe, folder)
        with processes.main_process_first():
            data = task.prepare(console if processes.is_main_process else Console(quiet=True))
        if data.validation is None and recipe.growth.trigger == "plateau":
            raise BadRequestError(
                "growth.trigger is plateau, and nothing is held out to see one by; give data.validation_fraction, or "
                "let growth.trigger be budget"
            )
        samples = len(data.train) if recipe.growth.in_epochs else None
        per_step = samples_per_step(recipe, processes.num_processes)
        ladder = build_ladder(recipe, first_config(recipe, data), per_step, samples)
        setting = Setting(
            recipe, folder, data, processes, console, Metrics(folder / "metrics.jsonl", ladder), Signals()
        )
        if passed_over(recipe) and processes.is_main_process:
            keys = ", ".join(f"model.{key}" for key in passed_over(recipe))
            console.print(f"model.checkpoint decides the model; {keys} are passed over", soft_wrap=True, markup=False)
        with setting.signals.listening():
            for number in range(1, len(ladder.stages) + 1):
                ladder = _start_of_stage(setting, ladder, number)
                _run_stage(setting, ladder, ladder.stages[number - 1])
    return stage_folder(folder, len(ladder.stages)) / "model"


def _start_of_stage(setting: Setting, ladder: Ladder, number: int) -> Ladder:
    """Make sure that a stage has a first checkpoint, and say where the ladder then stands."""
    folder, stage = stage_folder(setting.folder, number), ladder.stages[number - 1]
    if number > 1 and not (folder / "start.json").exists():
        _end_of_stage(setting, ladder, number - 1)
    if setting.processes.is_main_process and not (folder / "start.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        remove_partials(folder)
        if number == 1:
            step = 0
            replace_file(setting.folder / "recipe.yaml", setting.recipe.to_yaml())
            _first_checkpoint(setting, stage, folder / "checkpoint-0")
        else:
            source = checkpoints(stage_folder(setting.folder, number - 1))[-1]  # just verified, or just written
            step = checkpoint_step(source)
            assert stage.growth is not None
            kept = ladder.started_at(number, step).decay_start == step
            grow_checkpoint(source, folder / f"checkpoint-{step}", stage.growth, stage.adam, kept=kept)
        facts = {"step": step, f"{ladder.unit}_per_step": ladder.units_per_step, "data": setting.data.key}
        _write_json(folder / "start.json", facts)
    setting.processes.wait_for_everyone()
    start = json.loads((folder / "start.json").read_text())
    per_step = start[f"{ladder.unit}_per_step"]
    if per_step != ladder.units_per_step:
        raise BadRequestError(
            f"{setting.folder} was started with {per_step:,} {ladder.unit} a step, and now it would be "
            f"{ladder.units_per_step:,}; set training.global_batch so that processes and accumulation give the same"
        )
    if start.get("data", setting.data.key) != setting.data.key:  # older runs did not note it
        raise BadRequestError(
            f"{setting.folder} was started with other data than the recipe's sources hold now; put it back, or begin a "
            "new run in another training.output_dir"
        )
    ladder = ladder.started_at(number, start["step"])
    setting.metrics.ladder = ladder
    return ladder


def _end_of_stage(setting: Setting, ladder: Ladder, number: int) -> None:
    """Make sure that the checkpoint a stage ended with is good: if not, its last steps are made again."""
    result = stage_folder(setting.folder, number) / "result.json"
    if setting.processes.is_main_process:
        step = checkpoint_step(_verified(setting, number))
        if step != json.loads(result.read_text())["step"]:
            result.unlink()
    setting.processes.wait_for_everyone()
    _run_stage(setting, ladder, ladder.stages[number - 1])


def _first_checkpoint(setting: Setting, stage: Stage, target: Path) -> None:
    """The model as it is before the first step, so that every start is a continuation."""
    set_seed(setting.recipe.training["seed"])
    given = setting.recipe.model.get("checkpoint")
    model, same = setting.task.first_model(stage.config, given)
    with new_checkpoint(target) as folder:
        model.save_pretrained(folder)
        setting.task.save_beside(setting.data, folder)
        batch = local_batch(setting.recipe, setting.processes.num_processes)
        state = TrainerState(train_batch_size=batch, stateful_callbacks=[TrainerControl()])  # type: ignore[list-item]
        state.compute_steps(setting.arguments(stage), stage.end)
        state.save_to_json(str(folder / "trainer_state.json"))
        if given is None:
            return
        if not same:
            setting.console.print(
                f"{given} was trained for other outputs: its last layer starts afresh, and Adam too",
                soft_wrap=True,
                markup=False,
            )
            return
        for name in (OPTIMIZER_FILE, *([AVERAGE_FILE] if setting.recipe.training["ema"] else [])):
            if (Path(given) / name).exists():
                shutil.copy2(Path(given) / name, folder)


def _verified(setting: Setting, number: int) -> Path:
    """The newest good checkpoint of a stage, for the first process; newer broken ones are named and set aside."""
    folder = stage_folder(setting.folder, number)
    good, problems = last_good(folder)
    for problem in problems:
        setting.console.print(f"warning: {problem}; the checkpoint before it is used", soft_wrap=True, markup=False)
    if good is None:
        reason = f": {problems[0]}" if problems else ""
        raise BadFileError(f"{folder} has no good checkpoint{reason}; delete the folder to start the stage again")
    for broken in checkpoints(folder):
        if checkpoint_step(broken) > checkpoint_step(good):
            aside = broken.with_name(f"broken-{broken.name}")
            shutil.rmtree(aside, ignore_errors=True)
            broken.rename(aside)
    return good


def _run_stage(setting: Setting, ladder: Ladder, stage: Stage) -> None:
    folder = stage_folder(setting.folder, stage.number)
    if (folder / "result.json").exists():
        return
    if setting.processes.is_main_process:
        remove_partials(folder)
        _verified(setting, stage.number)
    setting.processes.wait_for_everyone()
    checkpoint = checkpoints(folder)[-1]
    step = checkpoint_step(checkpoint)
    set_seed(setting.recipe.training["seed"])
    model = load_model(setting.task.model_class, checkpoint, setting.recipe.training["parallel"], setting.processes)
    trainer = setting.trainer(ladder, stage, model, checkpoint)
    if setting.processes.is_main_process:
        setting.metrics.forget_after(stage.number, step)
        say_what_is_parallel(setting.console, model, setting.recipe.training["parallel"], setting.processes)
        _say_stage(setting.console, ladder, stage, step)
    if step == stage.start and stage.growth is not None:
        _measure_growth(setting, stage, trainer)
    if step < stage.end and not setting.ended_early(ladder, stage, checkpoint):
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint))
        finally:
            trainer.bar.close()
        if setting.signals.received is not None:
            raise StoppedError(setting.signals.received)
    _finish_stage(setting, stage, trainer, folder)


def _measure_growth(setting: Setting, stage: Stage, trainer: LadderTrainer) -> None:
    """Validate just after growth, and compare with what the stage before ended with."""
    assert stage.growth is not None
    folder = stage_folder(setting.folder, stage.number - 1)
    before = json.loads((folder / "result.json").read_text())
    after = validation_names(trainer.measured())
    if setting.processes.is_main_process:
        setting.metrics.write(
            "growth",
            stage.number,
            stage.start,
            method=stage.growth.method,
            parameters_before=before["parameters"],
            **{f"{name}_before": before.get(name) for name in after},
            **{f"{name}_after": value for name, value in after.items()},
        )
    check_growth(before, after, stage.number, stage.growth.method, folder)


def _finish_stage(setting: Setting, stage: Stage, trainer: LadderTrainer, folder: Path) -> None:
    """Keep the stage's model as an ordinary folder, and write down what it ended with."""
    checkpoint = checkpoints(folder)[-1]
    step = checkpoint_step(checkpoint)
    measured = validation_names(trainer.measured())
    bad = sorted(set(gather_object(setting.task.bad_samples(setting.data))))
    if setting.processes.is_main_process:
        if bad:
            setting.console.print(
                f"{setting.task.unit} so far that could not be read, whose places others took: {len(bad):,}; the "
                f"first: {bad[0]}",
                soft_wrap=True,
                markup=False,
            )
        weights = "averaged" if trainer.average is not None else "last"
        _save_model(setting, checkpoint, folder / "model")
        setting.metrics.write("stage_end", stage.number, step, weights=weights, **measured)
        result = {"step": step, "parameters": stage.parameters, "weights": weights, **measured}
        _write_json(folder / "result.json", result)
    setting.processes.wait_for_everyone()


def _save_model(setting: Setting, checkpoint: Path, target: Path) -> None:
    """The averaged weights, if there are any."""
    averaged = averaged_model(checkpoint) if setting.recipe.training["ema"] else None
    model = averaged[0] if averaged else read_tokenformer(checkpoint)
    setting.task.for_use(model.config)
    with new_checkpoint(target) as folder:
        model.save_pretrained(folder)
        setting.task.save_beside(setting.data, folder)


def _say_stage(console: Console, ladder: Ladder, stage: Stage, step: int) -> None:
    begins = f"carried on at step {step}" if step > stage.start else f"steps {stage.start} to {stage.end}"
    console.print(
        f"stage {stage.number}/{len(ladder.stages)}: {stage.parameters:,} parameters, {begins}", soft_wrap=True
    )


def _write_json(path: Path, data: dict[str, Any]) -> None:
    replace_file(path, json.dumps(data, indent=1))
