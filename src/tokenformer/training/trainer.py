"""transformers' Trainer, with what a ladder needs: our schedule and validation, named optimizer state, an average of
the weights, checkpoints that are atomic, frozen rows, and a stop at the first number that is not finite.

It overrides private methods of Trainer: support.py checks that they exist, `make test-versions` runs the oldest and the
newest transformers, and tests train, kill and resume real runs.
"""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.integrations import get_available_reporting_integrations

from ..data.base import STREAM_FILE, StreamInOrder
from ..errors import BadFileError, BadRequestError, BadResultError, one_line
from ..growth.rates import rate_shares
from ..io import naming, partial_path, seal_folder
from ..pattention import TOKENS
from . import optimizer_state
from .checkpoint import checkpoints, last_good, mark_kept, prune
from .ema import WeightAverage
from .held_rows import FrozenRows, NewTokenWarmup
from .ladder import Ladder, Stage
from .muon import MuonWithAdamW
from .nested import nest
from .rates import divide_by_share, share_by_depth
from .recipe import Recipe
from .validation import Validation, in_full_precision


class NotFiniteError(BadResultError):
    """The loss or the gradient became NaN or infinite."""


class LadderTrainer(Trainer):
    """Trains one stage of a ladder from a checkpoint, whose model it is given, up to the step at which it ends."""

    def __init__(
        self,
        recipe: Recipe,
        ladder: Ladder,
        stage: Stage,
        model: Any,
        checkpoint: Path,
        callbacks: Sequence[TrainerCallback],
    ) -> None:
        data, training = recipe.data_of(stage.number), recipe.training
        self.recipe, self.ladder, self.stage = recipe, ladder, stage
        self.frozen = FrozenRows(model, stage.growth) if stage.trains == "new" and stage.growth else None
        self._staging: Path | None = None
        self._resumed_from: str | None = None
        self._carried: optimizer_state.State = {}
        if training.nested:
            nest(model, training.nested)
        args = trainer_arguments(recipe, stage.number, stage.end)
        # Trainer's constructor refuses to save and resume a model that transformers sharded at loading, because
        # its own optimizer.pt could not; ours can.
        args.save_only_model = True
        samples_per_step = ladder.units_per_step // data.units_per_sample
        held_out = data.held_out(training.most_held_out)
        super().__init__(
            model=model,
            args=args,
            train_dataset=data.in_order(ladder.stages[-1].end, samples_per_step, checkpoint),
            eval_dataset=held_out,
            data_collator=data.collate,
            callbacks=list(callbacks),
        )
        args.save_only_model = False
        set_seed(args.seed + args.process_index)  # so that dropped paths differ between processes
        self.remove_callback(PrinterCallback)
        # Now that the model is on its device.
        self.average = WeightAverage(self.plain_model, training.ema, checkpoint) if training.ema is not None else None
        self._validation = None
        if held_out is not None:
            batch_size, workers = args.per_device_eval_batch_size, args.dataloader_num_workers
            self._validation = Validation(held_out, data.score, data.collate, batch_size, workers)

    @property
    def plain_model(self) -> Any:
        """The model without what accelerate put around it."""
        return self.accelerator.unwrap_model(self.model)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """All but those that Trainer leaves out, norms and biases, and those that the model does."""
        spared = tuple(getattr(self.plain_model, "no_decay", ()))
        return [name for name in super().get_decay_parameter_names(model) if name.rpartition(".")[2] not in spared]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As Trainer's, with a rate for every layer; after each step frozen rows are put back and weights averaged."""
        if self.recipe.training.optimizer == "muon":
            self.optimizer_cls_and_kwargs = MuonWithAdamW, self._muon_arguments()
        optimizer = super().create_optimizer(model)
        divide_by_share(optimizer, self.plain_model, self._rate_shares())
        if self.stage.growth is not None:
            self._warm_up(NewTokenWarmup(self.plain_model, self.stage.growth), optimizer)
        if self.frozen is not None:
            frozen = self.frozen
            optimizer.register_step_post_hook(lambda *_: frozen.put_back())
        if self.average is not None:
            average = self.average
            optimizer.register_step_post_hook(lambda *_: average.update())
        return optimizer

    def _muon_arguments(self) -> dict[str, Any]:
        """What MuonWithAdamW is given beside the groups."""
        training, named = self.recipe.training, self.plain_model.named_parameters()
        return {
            "lr": training.learning_rate,
            "betas": (training.adam_beta1, training.adam_beta2),
            "eps": training.adam_epsilon,
            "tokens": [parameter for name, parameter in named if name.endswith(TOKENS)],
            "fused": training.given_arguments().get("optim") == "adamw_torch_fused" or None,
        }

    def _warm_up(self, new: NewTokenWarmup, optimizer: torch.optim.Optimizer) -> None:
        """Let the steps of new tokens become as large as those of the old ones over the first steps of the stage."""
        steps, start = self.recipe.growth.new_token_warmup, self.stage.start

        def before(*_: Any) -> None:
            if self.state.global_step - start < steps:
                new.before_step()

        def after(*_: Any) -> None:
            done = self.state.global_step - start
            if done < steps:
                new.scale_step((done + 1) / (steps + 1))

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _rate_shares(self) -> dict[str, float]:
        """By parameter, its share of the learning rate: by the size of its layer, and by depth."""
        model, training = self.plain_model, self.recipe.training
        names, depth = (name for name, _ in model.named_parameters()), model.config.get_text_config().num_hidden_layers
        by_size = rate_shares(model, self.ladder.rate_base) if training.rates == "scaled" else dict.fromkeys(names, 1.0)
        return {name: share * share_by_depth(name, depth, training.layer_decay) for name, share in by_size.items()}

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """The ladder's schedule, by the step of the whole run."""
        scheduler = LambdaLR(optimizer or self._plain_optimizer, self.ladder.rate_factor)
        self.lr_scheduler, self._created_lr_scheduler = scheduler, True
        return scheduler

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        place = super()._init_training_state(max_steps, *args, **kwargs)
        # How often to log, validate and save is the recipe's to say, not the checkpoint's.
        self.state.compute_steps(self.args, max_steps)
        return place

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; after a stream's first batch the checkpoint's random numbers are restored again.

        Trainer restores them before it makes the data loader's iterator, which draws one, when no data is passed over.
        """
        batch = super().get_batch_samples(*args, **kwargs)
        if isinstance(self.train_dataset, StreamInOrder) and self._resumed_from is not None:
            self._load_rng_state(self._resumed_from)
            self._resumed_from = None
        return batch

    def _load_rng_state(self, checkpoint: str | None) -> None:
        try:
            super()._load_rng_state(checkpoint)
        except Exception as error:  # torch raises many kinds for a file that is not one of its own
            raise BadFileError(
                f"the random numbers in {checkpoint} (rng_state*.pth) cannot be read: {one_line(error)[:200]}; delete "
                "that folder, and the checkpoint before it is used"
            ) from error

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
        if self._validation is None:
            return {}
        return self._validation.measure(self.plain_model, self.args.device, self.average)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Our validation in place of Trainer's (validation.py says why), logged as Trainer does."""
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
            f"the last good checkpoint is {good}; go on from it with a lower rate, in another folder, without the "
            f"stages that are done: training.output_dir=… model.checkpoint={good} training.learning_rate=… "
            "growth.stages=…"
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
        with naming(target):
            try:
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    self._seal(self._staging / target.name, target)
            except Exception:
                shutil.rmtree(self._staging, ignore_errors=True)
                raise
            finally:
                self._staging = None
        self.accelerator.wait_for_everyone()

    def _seal(self, staged: Path, target: Path) -> None:
        """Complete a checkpoint that Trainer has written, and give it its name."""
        (staged / "training_args.bin").unlink(missing_ok=True)  # a pickle, and the recipe says it all
        self.recipe.data.save_beside(staged)
        if self.state.global_step == self.ladder.decay_start:
            mark_kept(staged)
        seal_folder(staged, target)
        staged.parent.rmdir()
        prune(target.parent, self.recipe.training.keep_checkpoints)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        optimizer_state.save(
            folder, self.plain_model, self._plain_optimizer, carried=self._carried, write=self.args.should_save
        )
        if self.average is not None:
            self.average.save(folder, write=self.args.should_save)
        if isinstance(self.train_dataset, StreamInOrder) and self.args.should_save:
            torch.save(self.train_dataset.state_after(self.state.global_step), folder / STREAM_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._resumed_from = checkpoint
        self._carried = optimizer_state.load(Path(checkpoint), self.plain_model, self._plain_optimizer)
        # The schedule is a function of the step, so it is set to where it stands, not loaded.
        scheduler: Any = self.lr_scheduler
        scheduler.last_epoch = self.state.global_step
        scheduler._last_lr = [base * self.ladder.rate_factor(scheduler.last_epoch) for base in scheduler.base_lrs]
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
            group["lr"] = rate

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing: the model was loaded from the checkpoint when it was made."""

    @property
    def _plain_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)


def stage_folder(recipe: Recipe, number: int) -> Path:
    """A stage's folder."""
    return recipe.folder / f"stage-{number}"


def trainer_arguments(recipe: Recipe, stage: int, steps: int) -> TrainingArguments:
    """Trainer's settings for a stage that ends at step `steps`."""
    given = recipe.training.given_arguments()
    check_reporters(recipe.training.report_to)
    arguments = {
        **given,
        "output_dir": str(stage_folder(recipe, stage)),
        "max_steps": steps,
        "per_device_train_batch_size": recipe.batch_per_process(PartialState().num_processes),
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "steps",
        "eval_strategy": "steps" if recipe.data_of(stage).validation is not None else "no",
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "logging_nan_inf_filter": False,
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        **recipe.data.implied_arguments(given),
    }
    try:
        return TrainingArguments(**arguments)
    except (ValueError, ImportError) as error:  # what TrainingArguments says of the user's values
        raise BadRequestError(f"{recipe.path}: training: {one_line(error)}") from error


def check_reporters(names: str | list[str]) -> None:
    """Refuse a tracker that is not installed."""
    installed = ["none", "all", *get_available_reporting_integrations(), "flyte"]  # which transformers does not list
    for name in [names] if isinstance(names, str) else names:
        if name not in installed:
            raise BadRequestError(
                f"training.report_to is {names!r}, and {name} is not installed here; choose from {', '.join(installed)}"
            )
