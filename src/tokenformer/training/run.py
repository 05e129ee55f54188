"""One run, from a recipe to the last stage's model: carried on from wherever it stands.

    RUN/recipe.yaml          the resolved recipe
    RUN/metrics.jsonl        measurements over the whole run
    RUN/stage-1/checkpoint-N the state of training at step N; the newest few are kept
    RUN/stage-1/model        the stage's model, an ordinary folder with its tokenizer
    RUN/stage-1/result.json  what the stage ended with

Everything a run needs to go on is in these files, each of which appears whole or not at all, so that the same command
carries on after any end.
"""

import json
import shutil
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from torch.utils.data import DataLoader, Subset
from transformers import TrainerControl, TrainerState, TrainingArguments, set_seed

from ..data import BlockStream, PreparedData, prepare
from ..errors import BadFileError, BadRequestError, BadResultError, one_line
from ..files import replace_file
from ..models import TokenFormerConfig, TokenFormerForCausalLM
from .callbacks import Bar, Metrics, Milestones, Plateau, Signals
from .checkpoint import checkpoint_step, checkpoints, last_good, new_checkpoint, remove_partials
from .frozen import FrozenRows
from .grow_checkpoint import grow_checkpoint
from .ladder import Ladder, Stage, build_ladder
from .lock import run_lock
from .optimizer_state import FILE as OPTIMIZER_FILE
from .order import OrderedBlocks, StreamedBlocks
from .parallel import load_model, reshard, say_what_is_parallel
from .recipe import OUR_TRAINING, Recipe
from .setup import (
    check_data,
    check_same_recipe,
    first_config,
    local_batch,
    passed_over,
    run_folder,
    tokens_per_step,
)
from .trainer import STREAM_FILE, LadderTrainer

# Exact growth must not be felt: more than rounding means that something is wrong.
LARGEST_RISE = 1e-3


class GrowthRiseError(BadResultError):
    """The validation loss rose at the moment of an exact growth step."""


class StoppedError(Exception):
    """A signal asked the run to stop, and its state is saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__("a checkpoint is written; the same command carries on")
        self.exit_code = 128 + signal_number


@dataclass
class Setting:
    """What all stages of a run share."""

    recipe: Recipe
    folder: Path
    data: PreparedData
    processes: PartialState
    console: Console
    metrics: Metrics
    signals: Signals

    def arguments(self, stage: Stage) -> TrainingArguments:
        """Trainer's settings for a stage."""
        ours = {key: value for key, value in self.recipe.training.items() if key not in OUR_TRAINING}
        batch = local_batch(self.recipe, self.processes.num_processes)
        return TrainingArguments(
            **{
                **ours,
                "output_dir": str(stage_folder(self.folder, stage.number)),
                "max_steps": stage.end,
                "per_device_train_batch_size": batch,
                "use_cpu": not torch.cuda.is_available(),
                "save_strategy": "steps",
                "eval_strategy": "steps" if self.data.validation is not None else "no",
                "prediction_loss_only": True,
                "train_sampling_strategy": "sequential",
                # A stream starts at its place; of prepared data Trainer passes over what has been used.
                "ignore_data_skip": self.recipe.data.streaming,
                "remove_unused_columns": False,
                "logging_nan_inf_filter": False,
                "ddp_find_unused_parameters": False,
                "disable_tqdm": True,
            }
        )


def train(recipe: Recipe, console: Console | None = None) -> Path:
    """Run a recipe to its end, or carry it on; returns the folder of the last stage's model."""
    console = console or Console(stderr=True)
    # The first process may prepare data for hours while the others wait.
    processes = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=7))
    folder = run_folder(recipe)
    check_data(recipe)
    with run_lock(folder, processes):
        check_same_recipe(recipe, folder)
        with processes.main_process_first():
            data = prepare(recipe.data, console=console if processes.is_main_process else Console(quiet=True))
        ladder = build_ladder(recipe, first_config(recipe, data), tokens_per_step(recipe, processes.num_processes))
        setting = Setting(
            recipe, folder, data, processes, console, Metrics(folder / "metrics.jsonl", ladder), Signals()
        )
        if passed_over(recipe) and processes.is_main_process:
            keys = ", ".join(f"model.{key}" for key in passed_over(recipe))
            console.print(f"model.checkpoint decides the model; {keys} are passed over", soft_wrap=True)
        with setting.signals.listening():
            for number in range(1, len(ladder.stages) + 1):
                ladder = _start_of_stage(setting, ladder, number)
                _run_stage(setting, ladder, ladder.stages[number - 1])
    return stage_folder(folder, len(ladder.stages)) / "model"


def stage_folder(folder: Path, number: int) -> Path:
    """A stage's folder."""
    return folder / f"stage-{number}"


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
            grow_checkpoint(source, folder / f"checkpoint-{step}", stage.growth, stage.adam)
        _write_json(folder / "start.json", {"step": step, "tokens_per_step": ladder.tokens_per_step})
    setting.processes.wait_for_everyone()
    start = json.loads((folder / "start.json").read_text())
    if start["tokens_per_step"] != ladder.tokens_per_step:
        raise BadRequestError(
            f"{setting.folder} was started with {start['tokens_per_step']:,} tokens a step, and now it would be "
            f"{ladder.tokens_per_step:,}; set training.global_batch so that processes and accumulation give the same"
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
    if given is None:
        model = TokenFormerForCausalLM(stage.config)
    else:
        model = TokenFormerForCausalLM.from_pretrained(given, dtype=torch.float32)
    with new_checkpoint(target) as folder:
        model.config.chunked_loss = True
        model.save_pretrained(folder)
        batch = local_batch(setting.recipe, setting.processes.num_processes)
        state = TrainerState(train_batch_size=batch, stateful_callbacks=[TrainerControl()])  # type: ignore[list-item]
        state.compute_steps(setting.arguments(stage), stage.end)
        state.save_to_json(str(folder / "trainer_state.json"))
        if given is not None and (Path(given) / OPTIMIZER_FILE).exists():
            shutil.copy2(Path(given) / OPTIMIZER_FILE, folder)


def _verified(setting: Setting, number: int) -> Path:
    """The newest good checkpoint of a stage, for the first process; newer broken ones are named and set aside."""
    folder = stage_folder(setting.folder, number)
    good, problems = last_good(folder)
    for problem in problems:
        setting.console.print(f"warning: {problem}; the checkpoint before it is used", soft_wrap=True)
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
    model = load_model(checkpoint, setting.recipe.training["parallel"], setting.processes)
    trainer = _trainer(setting, ladder, stage, model, checkpoint)
    if setting.processes.is_main_process:
        setting.metrics.forget_after(stage.number, step)
        say_what_is_parallel(setting.console, model, setting.recipe.training["parallel"], setting.processes)
        _say_stage(setting.console, ladder, stage, step)
    if step == stage.start and stage.growth is not None:
        _check_growth(setting, stage, trainer)
    if step < stage.end and not _ended_early(setting, ladder, stage, checkpoint):
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint))
        finally:
            trainer.bar.close()
        if setting.signals.received is not None:
            raise StoppedError(setting.signals.received)
    _finish_stage(setting, stage, trainer, folder)


def _trainer(setting: Setting, ladder: Ladder, stage: Stage, model: Any, checkpoint: Path) -> LadderTrainer:
    plateau = _plateau(setting, ladder, stage)
    bar = Bar(setting.console, ladder)
    callbacks = [setting.metrics, setting.signals, Milestones(ladder), bar]
    if plateau is not None:
        callbacks.append(plateau)
    held_out, validation = setting.data.validation, None
    if held_out is not None:
        validation = Subset(held_out, range(min(len(held_out), setting.recipe.training["validation_blocks"])))
    try:
        return LadderTrainer(
            model=model,
            args=setting.arguments(stage),
            ladder=ladder,
            bar=bar,
            keep=setting.recipe.training["keep_checkpoints"],
            frozen=FrozenRows(model, stage.growth) if stage.trains == "new" and stage.growth else None,
            train_dataset=_ordered(setting, ladder, checkpoint),
            eval_dataset=validation,
            callbacks=callbacks,
        )
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise BadRequestError(f"training: {one_line(error)}") from error


def _ordered(setting: Setting, ladder: Ladder, checkpoint: Path) -> OrderedBlocks | StreamedBlocks:
    """The training data in the order of the run."""
    train, blocks_per_step = setting.data.train, ladder.tokens_per_step // setting.recipe.data.block_length
    if isinstance(train, BlockStream):
        path = checkpoint / STREAM_FILE
        state = torch.load(path, weights_only=True) if path.exists() else None
        return StreamedBlocks(train, blocks_per_step, checkpoint_step(checkpoint), state)
    return OrderedBlocks(train, ladder.stages[-1].end * blocks_per_step, setting.recipe.data.seed)


def _check_growth(setting: Setting, stage: Stage, trainer: LadderTrainer) -> None:
    """Measure the validation loss just after growth and compare it with the one just before."""
    assert stage.growth is not None
    before = json.loads((stage_folder(setting.folder, stage.number - 1) / "result.json").read_text())
    after = _validation_loss(setting, trainer)
    if setting.processes.is_main_process:
        setting.metrics.write(
            "growth",
            stage.number,
            stage.start,
            method=stage.growth.method,
            parameters_before=before["parameters"],
            validation_loss_before=before["validation_loss"],
            validation_loss_after=after,
        )
    if after is None or before["validation_loss"] is None:
        return
    rise = after - before["validation_loss"]
    if stage.growth.method != "random" and not rise <= LARGEST_RISE:
        raise GrowthRiseError(
            f"the validation loss rose from {before['validation_loss']:.4f} to {after:.4f} when the model grew into "
            f"stage {stage.number} by {stage.growth.method}, which must not change it; the run as it was before is in "
            f"{stage_folder(setting.folder, stage.number - 1)}"
        )


@torch.no_grad()
def _validation_loss(setting: Setting, trainer: LadderTrainer) -> float | None:
    """The mean loss over the validation blocks, each process over all of them.

    Not Trainer's own evaluation: called outside of training it prepares the model in a way that `train` then takes for
    done, and gradients are not shared any more.
    """
    blocks: Any = trainer.eval_dataset
    if blocks is None:
        return None
    model = trainer.plain_model.eval()
    # In fp32, also where accelerate has put mixed precision around the forward pass, as it has after training.
    mixed = model.__dict__.pop("forward", None)
    total, count = 0.0, 0
    for batch in DataLoader(blocks, setting.recipe.training["per_device_eval_batch_size"]):
        loss = model(**{key: value.to(trainer.args.device) for key, value in batch.items()}).loss
        total, count = total + loss.item() * len(batch["input_ids"]), count + len(batch["input_ids"])
    if mixed is not None:
        model.forward = mixed
    reshard(model)
    return total / count


def _finish_stage(setting: Setting, stage: Stage, trainer: LadderTrainer, folder: Path) -> None:
    """Keep the stage's model as an ordinary folder, and write down what it ended with."""
    checkpoint = checkpoints(folder)[-1]
    step = checkpoint_step(checkpoint)
    loss = _validation_loss(setting, trainer)
    if setting.processes.is_main_process:
        _save_model(setting, checkpoint, folder / "model")
        setting.metrics.write("stage_end", stage.number, step, validation_loss=loss)
        result = {"step": step, "parameters": stage.parameters, "validation_loss": loss}
        _write_json(folder / "result.json", result)
    setting.processes.wait_for_everyone()


def _save_model(setting: Setting, checkpoint: Path, target: Path) -> None:
    with new_checkpoint(target) as folder:
        for path in checkpoint.iterdir():
            if path.name.endswith((".safetensors", ".json", ".py", ".md")) and path.name not in (
                OPTIMIZER_FILE,
                "trainer_state.json",
                "MANIFEST.json",
            ):
                shutil.copy2(path, folder)
        config = TokenFormerConfig.from_pretrained(folder)
        config.chunked_loss = False
        config.save_pretrained(folder)
        setting.data.tokenizer.save_pretrained(folder)


def _ended_early(setting: Setting, ladder: Ladder, stage: Stage, checkpoint: Path) -> bool:
    """Whether a plateau had ended the stage at this checkpoint when the run died."""
    plateau = _plateau(setting, ladder, stage)
    return plateau is not None and plateau.reached(TrainerState.load_from_json(str(checkpoint / "trainer_state.json")))


def _plateau(setting: Setting, ladder: Ladder, stage: Stage) -> Plateau | None:
    growth = setting.recipe.growth
    if growth.trigger != "plateau" or stage.number == len(ladder.stages):
        return None
    return Plateau(growth.patience, growth.min_improvement, stage.start)


def _say_stage(console: Console, ladder: Ladder, stage: Stage, step: int) -> None:
    begins = f"carried on at step {step}" if step > stage.start else f"steps {stage.start} to {stage.end}"
    console.print(
        f"stage {stage.number}/{len(ladder.stages)}: {stage.parameters:,} parameters, {begins}", soft_wrap=True
    )


def _write_json(path: Path, data: dict[str, Any]) -> None:
    replace_file(path, json.dumps(data, indent=1))
