"""What all stages of a run share, and the trainer of one stage made from it.

Enters: a recipe, its prepared data, and the processes. Leaves: a LadderTrainer with its arguments, its data in order
and its validation.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import TrainerState, TrainingArguments

from ..errors import BadRequestError, one_line
from .callbacks import Bar, Metrics, Milestones, Plateau, Signals
from .frozen import FrozenRows
from .ladder import Ladder, Stage
from .measure import Validation
from .recipe import Recipe
from .setup import local_batch
from .task import Task
from .trainer import LadderTrainer, Ways


def stage_folder(folder: Path, number: int) -> Path:
    """A stage's folder."""
    return folder / f"stage-{number}"


@dataclass
class Setting:
    """What all stages of a run share. `data` is what the task prepared."""

    recipe: Recipe
    folder: Path
    data: Any
    processes: PartialState
    console: Console
    metrics: Metrics
    signals: Signals

    @property
    def task(self) -> Task:
        return self.recipe.task

    def arguments(self, stage: Stage) -> TrainingArguments:
        """Trainer's settings for a stage."""
        return TrainingArguments(
            **{
                **self.recipe.trainer_arguments,
                "output_dir": str(stage_folder(self.folder, stage.number)),
                "max_steps": stage.end,
                "per_device_train_batch_size": local_batch(self.recipe, self.processes.num_processes),
                "use_cpu": not torch.cuda.is_available(),
                "save_strategy": "steps",
                "eval_strategy": "steps" if self.data.validation is not None else "no",
                "train_sampling_strategy": "sequential",
                "remove_unused_columns": False,
                "logging_nan_inf_filter": False,
                "ddp_find_unused_parameters": False,
                "disable_tqdm": True,
                **self.task.arguments(self.data, self.recipe.training),
            }
        )

    def validation(self, arguments: TrainingArguments) -> Validation | None:
        """What one validation looks at, and how."""
        held_out = self.task.held_out(self.data, self.recipe.training)
        if held_out is None:
            return None
        return Validation(
            held_out,
            self.task.score,
            self.task.collate(self.data),
            arguments.per_device_eval_batch_size,
            arguments.dataloader_num_workers,
        )

    def trainer(self, ladder: Ladder, stage: Stage, model: Any, checkpoint: Path) -> LadderTrainer:
        """The trainer of a stage, for the model of a checkpoint."""
        training, task = self.recipe.training, self.task
        bar, plateau = Bar(self.console, ladder), self._plateau(ladder, stage)
        try:
            arguments = self.arguments(stage)
            return LadderTrainer(
                model=model,
                args=arguments,
                ways=Ways(
                    ladder=ladder,
                    keep=training["keep_checkpoints"],
                    ema=training["ema"],
                    layer_decay=training["layer_decay"],
                    frozen=FrozenRows(model, stage.growth) if stage.trains == "new" and stage.growth else None,
                    validation=self.validation(arguments),
                    save_beside=lambda folder: task.save_beside(self.data, folder),
                ),
                bar=bar,
                checkpoint=checkpoint,
                train_dataset=task.ordered(
                    self.data, ladder.stages[-1].end, ladder.units_per_step // task.units_per_sample, checkpoint
                ),
                data_collator=task.collate(self.data),
                callbacks=[self.metrics, self.signals, Milestones(ladder), bar, *([plateau] if plateau else [])],
            )
        except (ValueError, TypeError, ImportError, RuntimeError) as error:
            raise BadRequestError(f"training: {one_line(error)}") from error

    def ended_early(self, ladder: Ladder, stage: Stage, checkpoint: Path) -> bool:
        """Whether a plateau had ended the stage at this checkpoint when the run died."""
        plateau = self._plateau(ladder, stage)
        return plateau is not None and plateau.reached(
            TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        )

    def _plateau(self, ladder: Ladder, stage: Stage) -> Plateau | None:
        growth = self.recipe.growth
        if growth.trigger != "plateau" or stage.number == len(ladder.stages):
            return None
        return Plateau(growth.patience, growth.min_improvement, stage.start)
