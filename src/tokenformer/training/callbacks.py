"""What happens beside the training loop: metrics to a file, a progress bar, signals, and the watch for a plateau."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..files import replace_file
from .ladder import Ladder
from .measure import validation_names


class Metrics(TrainerCallback):
    """metrics.jsonl: one line a measurement, over the whole run, each step once however often the run is resumed."""

    def __init__(self, path: Path, ladder: Ladder) -> None:
        self.path, self.ladder = path, ladder
        self._clock: tuple[float, int] | None = None

    def forget_after(self, stage: int, step: int) -> None:
        """Drop what a run that died wrote after the checkpoint from which it goes on."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the line during which it died
            place = entry["stage"], entry["step"]
            # What is measured when a stage begins and when it ends is measured again.
            again = (entry["kind"] == "growth" and place == (stage, step)) or (
                entry["kind"] == "stage_end" and entry["stage"] == stage
            )
            if place <= (stage, step) and not again:
                kept.append(line)
        replace_file(self.path, "".join(f"{line}\n" for line in kept))

    def write(self, kind: str, stage: int, step: int, **values: Any) -> None:
        """Append one line."""
        entry = {
            "kind": kind,
            "stage": stage,
            "step": step,
            self.ladder.unit: step * self.ladder.units_per_step,
            "flops": self.ladder.flops(step),
            "parameters": self.ladder.stages[stage - 1].parameters,
            **values,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._clock = time.perf_counter(), state.global_step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            stage = self.ladder.stage_at(state.global_step - 1).number
            now, (then, step) = time.perf_counter(), self._clock or (0.0, 0)
            self._clock = now, state.global_step
            units = (state.global_step - step) * self.ladder.units_per_step
            self.write(
                "train",
                stage,
                state.global_step,
                loss=logs["loss"],
                lr=logs["learning_rate"],
                grad_norm=logs.get("grad_norm"),
                **{f"{self.ladder.unit}_per_second": round(units / (now - then), 1)},
            )

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            stage = self.ladder.stage_at(max(0, state.global_step - 1)).number
            found = {name.removeprefix("eval_"): value for name, value in kwargs["metrics"].items()}
            self.write("validation", stage, state.global_step, **validation_names(found))
            self._clock = time.perf_counter(), state.global_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._clock = None


class Signals(TrainerCallback):
    """SIGTERM and the first Ctrl-C save a checkpoint and stop; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over both signals for a while. Only the main thread can; in another nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        if os.environ.get("RANK", "0") != "0":
            return
        print("\nstopping: a checkpoint is written first; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._anywhere(args):
            control.should_save = True
            control.should_training_stop = True

    def _anywhere(self, args: TrainingArguments) -> bool:
        """Whether any process has received one: all have to stop at the same step, or they wait for each other."""
        if args.world_size == 1:
            return self.received is not None
        received = torch.tensor(self.received or 0, device=args.device)
        torch.distributed.all_reduce(received, op=torch.distributed.ReduceOp.MAX)
        self.received = int(received) or None
        return self.received is not None


class Milestones(TrainerCallback):
    """A checkpoint just before the learning rate decays, which is kept, and a log line at a stage's last step."""

    def __init__(self, ladder: Ladder) -> None:
        self.ladder = ladder

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self.ladder.decay_start:
            control.should_save = True
        if state.global_step == self.ladder.stage_at(state.global_step - 1).end:
            control.should_log = True


class Plateau(TrainerCallback):
    """Ends a stage when the validation loss has flattened: no gain of `min_improvement` in `patience` validations."""

    def __init__(self, patience: int, min_improvement: float, start: int) -> None:
        self.patience, self.min_improvement, self.start = patience, min_improvement, start

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.reached(state):
            control.should_save = True
            control.should_training_stop = True

    def reached(self, state: TrainerState) -> bool:
        """Whether the last `patience` losses of the stage are no better than the best before them."""
        history = [entry for entry in state.log_history if "eval_loss" in entry]
        losses = [entry["eval_loss"] for entry in history if entry["step"] > self.start]
        if len(losses) <= self.patience:
            return False
        before, after = min(losses[: -self.patience]), min(losses[-self.patience :])
        return before - after < self.min_improvement


class Bar(TrainerCallback):
    """A progress bar with the time left; in a log file, a line at every tenth of a stage."""

    def __init__(self, console: Console, ladder: Ladder) -> None:
        self.console, self.ladder = console, ladder
        self.progress: Progress | None = None
        self._task: Any = None
        self._loss: float | None = None
        self._said = (0, 0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console)
        stage = self.ladder.stage_at(state.global_step)
        self._task = self.progress.add_task(
            f"stage {stage.number}/{len(self.ladder.stages)}",
            total=self.ladder.stages[-1].end,
            completed=state.global_step,
            loss=self._shown_loss,
        )
        self.progress.start()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" not in logs:
            return
        self._loss = logs["loss"]
        stage = self.ladder.stage_at(state.global_step - 1)
        tenth = 10 * (state.global_step - stage.start) // stage.steps
        if self.progress is None and state.is_world_process_zero and (stage.number, tenth) > self._said:
            self._said = stage.number, tenth
            self.console.print(
                f"stage {stage.number}/{len(self.ladder.stages)}  step {state.global_step}/{self.ladder.stages[-1].end}"
                f"  {self._shown_loss}"
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.progress is not None:
            self.progress.update(self._task, completed=state.global_step, loss=self._shown_loss)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    @property
    def _shown_loss(self) -> str:
        return "" if self._loss is None else f"loss {self._loss:.3f}"

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
