"""transformers' Trainer, with what a ladder needs: our schedule and validation, named optimizer state, an average of
the weights, checkpoints that are atomic, frozen rows, and a stop at the first number that is not finite.

It overrides private methods of Trainer (_save_checkpoint and what it calls, _clip_grad_norm): the minor version of
transformers is pinned for that, and tests train, kill and resume real runs.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from ..errors import BadResultError, one_line
from . import optimizer_state
from .average import WeightAverage
from .callbacks import Bar
from .checkpoint import checkpoints, last_good, mark_kept, partial_path, prune, seal
from .frozen import FrozenRows
from .ladder import Ladder
from .layer_rates import divide_by_depth
from .measure import Validation, in_full_precision
from .order import STREAM_FILE, StreamedBlocks


class NotFiniteError(BadResultError):
    """The loss or the gradient became NaN or infinite."""


@dataclass(frozen=True)
class Ways:
    """How a stage is trained, beside TrainingArguments.

    keep: the checkpoints that stay; ema: the decay of the weights' average, or None; layer_decay: of the learning rate;
    save_beside: writes into a checkpoint's folder what belongs to the model beside its weights.
    """

    ladder: Ladder
    keep: int
    ema: float | None
    layer_decay: float
    frozen: FrozenRows | None
    validation: Validation | None
    save_beside: Callable[[Path], None]


class LadderTrainer(Trainer):
    """Trains one stage of a ladder from a checkpoint, whose model it is given, up to the step at which it ends."""

    def __init__(self, *, args: TrainingArguments, ways: Ways, bar: Bar, checkpoint: Path, **more: Any):
        self.ways, self.ladder, self.frozen, self.bar = ways, ways.ladder, ways.frozen, bar
        self._staging: Path | None = None
        self._resumed_from: str | None = None
        self._carried: optimizer_state.State = {}
        # Trainer's constructor refuses to save and resume a model that transformers sharded at loading, because
        # its own optimizer.pt could not; ours can.
        args.save_only_model = True
        super().__init__(args=args, eval_dataset=ways.validation and ways.validation.samples, **more)
        args.save_only_model = False
        set_seed(args.seed + args.process_index)  # each process drops other paths
        self.remove_callback(PrinterCallback)
        # Now that the model is on its device.
        self.average = WeightAverage(self.plain_model, ways.ema, checkpoint) if ways.ema is not None else None

    @property
    def plain_model(self) -> Any:
        """The model without what accelerate put around it."""
        return self.accelerator.unwrap_model(self.model)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """All but those that Trainer leaves out, norms and biases, and those that the model does."""
        spared = tuple(self.plain_model.no_decay)
        return [name for name in super().get_decay_parameter_names(model) if name.rpartition(".")[2] not in spared]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As Trainer's, with a rate by depth; after each step frozen rows are put back and weights averaged."""
        optimizer = super().create_optimizer(model)
        if self.ways.layer_decay != 1:
            layers = self.plain_model.config.num_hidden_layers
            divide_by_depth(optimizer, self.plain_model, layers, self.ways.layer_decay)
        if self.frozen is not None:
            frozen = self.frozen
            optimizer.register_step_post_hook(lambda *_: frozen.put_back())
        if self.average is not None:
            average = self.average
            optimizer.register_step_post_hook(lambda *_: average.update())
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """The ladder's schedule, by the step of the whole run."""
        scheduler = LambdaLR(optimizer or self._plain_optimizer, self.ladder.learning_rate)
        self.lr_scheduler, self._created_lr_scheduler = scheduler, True
        return scheduler

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        place = super()._init_training_state(max_steps, *args, **kwargs)
        # How often to log, validate and save is the recipe's to say, not the checkpoint's.
        self.state.compute_steps(self.args, max_steps)
        return place

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; a stream's first batch is followed by the checkpoint's random numbers.

        Trainer restores them before it makes the data loader's iterator, which draws one, when no data is passed over.
        """
        batch = super().get_batch_samples(*args, **kwargs)
        if isinstance(self.train_dataset, StreamedBlocks) and self._resumed_from is not None:
            self._load_rng_state(self._resumed_from)
            self._resumed_from = None
        return batch

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As Trainer's; a loss that is not finite ends the run before it reaches the weights."""
        loss = super().training_step(*args, **kwargs)
        self._check_finite("loss", loss)
        return loss

    def measured(self) -> dict[str, float]:
        """Validation in full precision, also where training is in mixed precision."""
        with in_full_precision(self.plain_model):
            return self._measure()

    def _measure(self) -> dict[str, float]:
        if self.ways.validation is None:
            return {}
        return self.ways.validation.measure(self.plain_model, self.args.device, self.average)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Our validation in place of Trainer's (measure.py says why), logged as Trainer does."""
        metrics = {f"eval_{name}": value for name, value in self._measure().items()}
        self.log(dict(metrics))  # which adds to what it is given
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.frozen is not None:
            self.frozen.clear_gradients()
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Called at every step, also where nothing was clipped: then without a norm."""
        if self.frozen is not None and grad_norm is None:
            self.frozen.clear_gradients()
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        # In fp16 an overflow is ordinary: the scaler passes over the step and lowers its scale.
        if norm is not None and self.accelerator.scaler is None:
            self._check_finite("gradient norm", norm)
        return norm

    def _check_finite(self, what: str, value: Any) -> None:
        number = float(value)
        if math.isfinite(number):
            return
        good, _ = last_good(Path(str(self.args.output_dir)))
        raise NotFiniteError(
            f"the {what} is {number} at step {self.state.global_step + 1}; "
            f"the last good checkpoint is {good}; go on from it in another folder with a lower rate: "
            f"training.output_dir=… model.checkpoint={good} training.learning_rate=…"
        )

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or self.args.output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let Trainer write into a hidden folder, then seal it and give it its name."""
        step = self.state.global_step
        target = Path(str(self.args.output_dir)) / f"checkpoint-{step}"
        if target in checkpoints(target.parent):
            return
        self._staging = partial_path(target)
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(self._staging, ignore_errors=True)
            good, _ = last_good(target.parent)
            raise BadResultError(
                f"{target} could not be written ({one_line(error)}); the last good checkpoint is {good}: make room and "
                "give the same command again"
            ) from error
        finally:
            staged, self._staging = self._staging / target.name, None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            (staged / "training_args.bin").unlink(missing_ok=True)  # a pickle, and the recipe says it all
            self.ways.save_beside(staged)
            if step == self.ladder.decay_start:
                mark_kept(staged)
            seal(staged, target)
            staged.parent.rmdir()
            prune(target.parent, self.ways.keep)
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        optimizer_state.save(
            folder, self.plain_model, self._plain_optimizer, carried=self._carried, write=self.args.should_save
        )
        if self.average is not None:
            self.average.save(folder, write=self.args.should_save)
        if isinstance(self.train_dataset, StreamedBlocks) and self.args.should_save:
            torch.save(self.train_dataset.state_after(self.state.global_step), folder / STREAM_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._resumed_from = checkpoint
        self._carried = optimizer_state.load(Path(checkpoint), self.plain_model, self._plain_optimizer)
        # The schedule is a function of the step, so it is set to where it stands, not loaded.
        scheduler: Any = self.lr_scheduler
        scheduler.last_epoch = self.state.global_step
        scheduler._last_lr = [base * self.ladder.learning_rate(scheduler.last_epoch) for base in scheduler.base_lrs]
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
            group["lr"] = rate

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing: the model was loaded from the checkpoint when it was made."""

    @property
    def _plain_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)
