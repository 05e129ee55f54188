"""One run, from a recipe to the last stage's model: resumed from wherever it stands.

    RUN/recipe.yaml          the resolved recipe, which later starts are compared with
    RUN/lock                 held while a process trains here
    RUN/metrics.jsonl        measurements over the whole run
    RUN/stage-1/start.json   at which step the stage started, with which data
    RUN/stage-1/checkpoint-N the state of training at step N; the newest few are kept
    RUN/stage-1/model        the stage's model, an ordinary folder with its tokenizer or image processor
    RUN/stage-1/result.json  what the stage ended with: it is done

Everything a run needs to go on is in these files, each of which appears whole or not at all, so that the same command
resumes after any end.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from transformers import TrainerControl, TrainerState, set_seed

from ..data.sources import check_readable
from ..errors import BadFileError, BadRequestError
from ..groups.methods import switched_off
from ..growth import apply_growth
from ..io import lock, new_folder, read_json, remove_partials, replace_file
from ..models.card import write_card
from ..models.loading import read_model
from .callbacks import Bar, Metrics, Milestones, Plateau, Signals
from .checkpoint import checkpoint_step, checkpoints, grow_checkpoint, last_good
from .distributed import load_model, naming_a_lost_process, say_what_is_parallel
from .ema import FILE as AVERAGE_FILE
from .ema import averaged_model
from .ladder import Ladder, Stage, build_ladder, first_config, ignored_model_keys
from .memory import check_memory
from .optimizer_state import FILE as OPTIMIZER_FILE
from .recipe import Recipe, check_same_recipe
from .summary import card_facts
from .support import check_fsdp, version_warning
from .trainer import LadderTrainer, stage_folder, trainer_arguments
from .validation import check_loss_unchanged, validation_names


class StoppedError(Exception):
    """A signal asked the run to stop, and its state is saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__("a checkpoint is saved; the same command resumes")
        self.exit_code = 128 + signal_number


@dataclass
class Run:
    """A recipe that is being trained, with its data prepared: what all of its stages share."""

    recipe: Recipe
    processes: PartialState
    console: Console
    metrics: Metrics
    signals: Signals

    @property
    def folder(self) -> Path:
        return self.recipe.folder

    def say(self, line: str) -> None:
        """A line to the user, whatever is in it, from the first process."""
        if self.processes.is_main_process:
            self.console.print(line, soft_wrap=True, markup=False)


def train(recipe: Recipe, console: Console | None = None) -> Path:
    """Run a recipe to its end, or carry it on; returns the folder of the last stage's model."""
    console = console or Console(stderr=True)
    # The first process may prepare data for hours while the others wait.
    processes = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=7))
    _check_before_reading(recipe, processes.num_processes)
    with run_lock(recipe.folder, processes):
        check_same_recipe(recipe, recipe.folder)
        with processes.main_process_first():
            for data in (recipe.data, *recipe.data_of_stages.values()):
                data.prepare(console if processes.is_main_process else Console(quiet=True))
        if recipe.data.validation is None and recipe.growth.trigger == "plateau":
            raise BadRequestError(
                "growth.trigger is plateau, which needs validation data, and none is held out; set "
                "data.validation_fraction, or growth.trigger=budget"
            )
        ladder = build_ladder(recipe, processes.num_processes)
        check_memory(recipe, ladder, processes.num_processes)
        run = Run(recipe, processes, console, Metrics(recipe.folder / "metrics.jsonl", ladder), Signals())
        if ignored_model_keys(recipe):
            keys = ", ".join(f"model.{key}" for key in ignored_model_keys(recipe))
            run.say(f"model.checkpoint decides the model; ignored: {keys}")
        for warning in (version_warning(transformers.__version__), ladder.warning):
            if warning:
                run.say(f"warning: {warning}")
        with run.signals.listening(), naming_a_lost_process(recipe.folder, processes):
            for number in range(1, len(ladder.stages) + 1):
                ladder = _start_of_stage(run, ladder, number)
                _run_stage(run, ladder, ladder.stages[number - 1])
    return stage_folder(recipe, len(ladder.stages)) / "model"


def _check_before_reading(recipe: Recipe, processes: int) -> None:
    """Refuse everything that can be refused without the data, which may take hours to prepare."""
    if recipe.training.fp16 and not torch.cuda.is_available():
        raise BadRequestError("training.fp16 is true, but no GPU was found; use training.bf16")
    if recipe.training.parallel == "fsdp" and processes > 1:
        check_fsdp(transformers.__version__)
    metrics = recipe.folder / "metrics.jsonl"
    if metrics.exists():
        check_readable(metrics)
    recipe.check_data(processes)
    recipe.data.inspect(count_samples=False)
    trainer_arguments(recipe, stage=1, steps=1)
    config = first_config(recipe)
    if not recipe.growth.in_epochs and not recipe.data.assumptions(config):
        check_memory(recipe, build_ladder(recipe, processes), processes)


@contextmanager
def run_lock(folder: Path, processes: PartialState) -> Iterator[None]:
    """Make the folder and let one process, or one group of them, into it at a time."""
    if not processes.is_main_process:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise BadRequestError(
            f"{folder} cannot be written ({error.strerror}); choose another training.output_dir"
        ) from error
    with lock(folder / "lock", wait=False) as held:
        if not held:
            raise BadRequestError(
                f"another process is training in {folder}; wait for it, or choose another training.output_dir"
            )
        yield


def _start_of_stage(run: Run, ladder: Ladder, number: int) -> Ladder:
    """Make sure that a stage has a first checkpoint, and say where the ladder then stands."""
    folder, stage = stage_folder(run.recipe, number), ladder.stages[number - 1]
    if number > 1 and not (folder / "start.json").exists():
        _end_of_stage(run, ladder, number - 1)
    if run.processes.is_main_process and not (folder / "start.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        remove_partials(folder)
        if number == 1:
            step = 0
            replace_file(run.folder / "recipe.yaml", run.recipe.to_yaml())
            _first_checkpoint(run, stage, folder / "checkpoint-0")
        else:
            source = checkpoints(stage_folder(run.recipe, number - 1))[-1]  # just verified, or just written
            step = checkpoint_step(source)
            assert stage.growth is not None
            kept = ladder.started_at(number, step).decay_start == step
            grow_checkpoint(source, folder / f"checkpoint-{step}", stage.growth, stage.adam, kept=kept)
        key = run.recipe.data_of(number).key
        facts = {"step": step, f"{ladder.unit}_per_step": ladder.units_per_step, "data": key}
        facts["rate_base"] = ladder.rate_base
        _write_json(folder / "start.json", facts)
    run.processes.wait_for_everyone()
    start = _start(run, folder, number)
    per_step = start.get(f"{ladder.unit}_per_step", ladder.units_per_step)
    if per_step != ladder.units_per_step:
        raise BadRequestError(
            f"{run.folder} was started with {per_step:,} {ladder.unit} a step, and now it would be "
            f"{ladder.units_per_step:,}; set training.global_batch so that processes and accumulation give the same"
        )
    key = run.recipe.data_of(number).key
    if start.get("data", key) != key:  # older runs did not note it
        raise BadRequestError(
            f"{run.folder} was started with other data than the recipe's sources hold now; put it back, or begin a "
            "new run in another training.output_dir"
        )
    ladder = ladder.started_at(number, start["step"])
    # As the run began: the folder of model.checkpoint may have changed since.
    ladder = replace(ladder, rate_base=start.get("rate_base", ladder.rate_base))
    run.metrics.ladder = ladder
    return ladder


def _start(run: Run, folder: Path, number: int) -> dict[str, Any]:
    """What start.json says. If it is damaged, the step, which the stage before knows too."""
    start = _read_json(folder / "start.json", "step")
    if start is not None:
        return start
    before = _read_json(stage_folder(run.recipe, number - 1) / "result.json", "step") if number > 1 else {"step": 0}
    if before is None:
        raise BadFileError(
            f"{folder / 'start.json'} is damaged, and so is result.json of the stage before; delete {folder} to start "
            "the stage again"
        )
    run.say(f"warning: {folder / 'start.json'} is damaged; the stage starts at step {before['step']}, as it did")
    return {"step": before["step"]}


def _end_of_stage(run: Run, ladder: Ladder, number: int) -> None:
    """Make sure that the checkpoint a stage ended with is good: if not, its last steps are made again."""
    result = stage_folder(run.recipe, number) / "result.json"
    if run.processes.is_main_process:
        step = checkpoint_step(_verified(run, number))
        ended = _read_json(result, "step", "parameters")
        if ended is None:
            run.say(f"warning: {result} is damaged; measuring the end of stage {number} again")
        if ended is None or step != ended["step"]:
            result.unlink()
    run.processes.wait_for_everyone()
    _run_stage(run, ladder, ladder.stages[number - 1])


def _first_checkpoint(run: Run, stage: Stage, target: Path) -> None:
    """The model as it is before the first step, so that every start is a continuation."""
    set_seed(run.recipe.training.seed)
    given = run.recipe.model.get("checkpoint")
    config = stage.config if stage.growth is None else first_config(run.recipe)
    model, same = run.recipe.data.first_model(config, given)
    if stage.growth is not None:
        apply_growth(model, stage.growth, inplace=True)
    with new_folder(target) as folder:
        model.save_pretrained(folder)
        run.recipe.data.save_beside(folder)
        batch = run.recipe.batch_per_process(run.processes.num_processes)
        state = TrainerState(train_batch_size=batch, stateful_callbacks=[TrainerControl()])  # type: ignore[list-item]
        state.compute_steps(trainer_arguments(run.recipe, stage.number, stage.end), stage.end)
        state.save_to_json(str(folder / "trainer_state.json"))
        if given is None:
            return
        if not same:
            run.say(f"{given} has other classes: the classifier is initialised anew, and Adam's state is reset")
            return
        for name in (OPTIMIZER_FILE, *([AVERAGE_FILE] if run.recipe.training.ema else [])):
            if (Path(given) / name).exists():
                shutil.copy2(Path(given) / name, folder)


def _verified(run: Run, number: int) -> Path:
    """The newest good checkpoint of a stage, for the first process; newer broken ones are named and set aside."""
    folder = stage_folder(run.recipe, number)
    good, problems = last_good(folder)
    if good is None:
        reason = f": {problems[0]}" if problems else ""
        raise BadFileError(f"{folder} has no good checkpoint{reason}; delete the folder to start the stage again")
    for problem in problems:
        run.say(f"warning: {problem}; {good.name} is used")
    for broken in checkpoints(folder):
        if checkpoint_step(broken) > checkpoint_step(good):
            aside = broken.with_name(f"broken-{broken.name}")
            shutil.rmtree(aside, ignore_errors=True)
            broken.rename(aside)
    return good


def _run_stage(run: Run, ladder: Ladder, stage: Stage) -> None:
    folder = stage_folder(run.recipe, stage.number)
    if (folder / "result.json").exists():
        return
    if run.processes.is_main_process:
        remove_partials(folder)
        _verified(run, stage.number)
    run.processes.wait_for_everyone()
    checkpoint = checkpoints(folder)[-1]
    step = checkpoint_step(checkpoint)
    set_seed(run.recipe.training.seed)
    model = load_model(run.recipe.data.model_class, checkpoint, run.recipe.training.parallel, run.processes)
    bar, plateau = Bar(run.console, ladder, run.metrics), _plateau(run.recipe, ladder, stage)
    callbacks = [run.metrics, run.signals, Milestones(ladder), bar, *([plateau] if plateau else [])]
    trainer = LadderTrainer(run.recipe, ladder, stage, model, checkpoint, callbacks)
    if run.processes.is_main_process:
        damaged = run.metrics.forget_after(stage.number, step)
        if damaged:
            run.say(f"warning: damaged lines in {run.metrics.path} were dropped: {damaged:,}")
        say_what_is_parallel(run.console, model, run.recipe.training.parallel, run.processes)
        begins = f"resumed at step {step}" if step > stage.start else f"steps {stage.start} to {stage.end}"
        run.console.print(
            f"stage {stage.number}/{len(ladder.stages)}: {stage.parameters:,} parameters, {begins}", soft_wrap=True
        )
    if step == stage.start and stage.growth is not None:
        _measure_growth(run, stage, trainer)
    # A plateau may have ended the stage at this checkpoint just before the run died.
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    reason = plateau.reason(state) if plateau else ""
    if step < stage.end and not reason:
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint))
        finally:
            bar.close()
        if run.signals.received is not None:
            raise StoppedError(run.signals.received)
        reason = plateau.reason(trainer.state) if plateau else ""
    if reason:
        step = checkpoint_step(checkpoints(folder)[-1])
        run.say(f"stage {stage.number}/{len(ladder.stages)} ends at step {step}: {reason}")
    _finish_stage(run, stage, trainer, folder)


def _plateau(recipe: Recipe, ladder: Ladder, stage: Stage) -> Plateau | None:
    growth = recipe.growth
    if growth.trigger != "plateau" or stage.number == len(ladder.stages):
        return None
    return Plateau(growth.patience, growth.min_improvement, stage.start)


def _measure_growth(run: Run, stage: Stage, trainer: LadderTrainer) -> None:
    """Validate just after growth, and compare with what the stage before ended with; of a group, without it."""
    assert stage.growth is not None
    folder = stage_folder(run.recipe, stage.number - (stage.growth.group is None))
    before = _without_the_group(stage, trainer) if stage.growth.group else _end_of(run, stage.number - 1)
    after = validation_names(trainer.measured())
    if run.processes.is_main_process:
        run.metrics.write(
            "growth",
            stage.number,
            stage.start,
            method=stage.growth.label,
            parameters_before=before["parameters"],
            **{f"{name}_before": before.get(name) for name in after},
            **{f"{name}_after": value for name, value in after.items()},
        )
    check_loss_unchanged(before, after, stage.number, stage.growth.method, folder)


def _without_the_group(stage: Stage, trainer: LadderTrainer) -> dict[str, Any]:
    """What the model measures on the stage's data with its new group switched off."""
    assert stage.growth is not None
    assert stage.growth.group is not None
    with switched_off(trainer.plain_model, stage.growth.group.name):
        measured = validation_names(trainer.measured())
    own = sum(p.numel() for name, p in trainer.plain_model.named_parameters() if stage.growth.group.has(name))
    return {"parameters": stage.parameters - own, **measured}


def _end_of(run: Run, number: int) -> dict[str, Any]:
    """What a stage ended with."""
    folder = stage_folder(run.recipe, number)
    ended = _read_json(folder / "result.json", "step", "parameters")
    if ended is None:
        raise BadFileError(
            f"{folder / 'result.json'} is damaged; delete it and {stage_folder(run.recipe, number + 1)} to measure the "
            f"end of stage {number} again"
        )
    return ended


def _finish_stage(run: Run, stage: Stage, trainer: LadderTrainer, folder: Path) -> None:
    """Keep the stage's model as an ordinary folder, and write down what it ended with."""
    checkpoint = checkpoints(folder)[-1]
    step = checkpoint_step(checkpoint)
    measured = validation_names(trainer.measured())
    bad = sorted(set(gather_object(run.recipe.data_of(stage.number).unreadable())))
    if run.processes.is_main_process:
        if bad:
            run.say(
                f"{len(bad):,} {run.recipe.data.unit} could not be read and were replaced by others; first: {bad[0]}"
            )
        weights = "averaged" if trainer.average is not None else "last"
        run.metrics.write("stage_end", stage.number, step, weights=weights, **measured)
        _save_model(run, checkpoint, folder / "model")
        result = {"step": step, "parameters": stage.parameters, "weights": weights, **measured}
        _write_json(folder / "result.json", result)
    run.processes.wait_for_everyone()


def _save_model(run: Run, checkpoint: Path, target: Path) -> None:
    """Save a stage's model: the averaged weights if there are any, otherwise the last."""
    averaged = averaged_model(checkpoint) if run.recipe.training.ema else None
    model = averaged[0] if averaged else read_model(checkpoint)
    run.recipe.data.restore_config(model.config)
    with new_folder(target) as folder:
        model.save_pretrained(folder)
        write_card(model, folder, card_facts(run.folder, run.recipe))
        run.recipe.data.save_beside(folder)


def _read_json(path: Path, *keys: str) -> dict[str, Any] | None:
    """A file of ours with whole numbers by these keys; None if it is damaged."""
    try:
        data = read_json(path)
        return data if all(isinstance(data[key], int) for key in keys) else None
    except (BadFileError, TypeError, KeyError):
        return None


def _write_json(path: Path, data: dict[str, Any]) -> None:
    replace_file(path, json.dumps(data, indent=1))
