"""What happens beside the training loop: metrics to a file, a progress bar, signals, and the watch for a plateau."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..io import naming, replace_file
from .ladder import Ladder
from .validation import validation_names


def read_entry(line: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is damaged."""
    try:
        entry = json.loads(line)
        return entry if isinstance(entry["stage"], int) and isinstance(entry["step"], int) and entry["kind"] else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class Metrics(TrainerCallback):
    """metrics.jsonl: one line a measurement, over the whole run, each step once however often the run is resumed."""

    def __init__(self, path: Path, ladder: Ladder) -> None:
        self.path, self.ladder = path, ladder
        self.speed: float | None = None  # tokens or images per second, when it was last measured
        self._clock: tuple[float, int] | None = None

    def forget_after(self, stage: int, step: int) -> int:
        """Drop what a run that died wrote after the checkpoint from which it goes on, and lines that cannot be read.

        Returns how many of those there were, without the last line, during which it may have died.
        """
        if not self.path.exists():
            return 0
        kept, damaged = [], 0
        lines = self.path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines, start=1):
            entry = read_entry(line)
            if entry is None:
                damaged += number < len(lines)
                continue
            place = entry["stage"], entry["step"]
            # What is measured when a stage begins and when it ends is measured again.
            again = (entry["kind"] == "growth" and place == (stage, step)) or (
                entry["kind"] == "stage_end" and entry["stage"] == stage
            )
            if place <= (stage, step) and not again:
                kept.append(line)
        replace_file(self.path, "".join(f"{line}\n" for line in kept))
        return damaged

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
        with naming(self.path), self.path.open("a") as file:
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
            self.speed = round((state.global_step - step) * self.ladder.units_per_step / (now - then), 1)
            self.write(
                "train",
                stage,
                state.global_step,
                loss=logs["loss"],
                lr=logs["learning_rate"],
                grad_norm=logs.get("grad_norm"),
                **{f"{self.ladder.unit}_per_second": self.speed},
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
        if self.reason(state):
            control.should_save = True
            control.should_training_stop = True

    def reason(self, state: TrainerState) -> str:
        """Why the stage ends: its last `patience` losses hardly improve on the best before. Empty if it goes on."""
        history = [entry for entry in state.log_history if "eval_loss" in entry]
        losses = [entry["eval_loss"] for entry in history if entry["step"] > self.start]
        if len(losses) <= self.patience:
            return ""
        before, after = min(losses[: -self.patience]), min(losses[-self.patience :])
        if before - after >= self.min_improvement:
            return ""
        return (
            f"the validation loss has flattened: the best of the last {self.patience} is {after:.4f} and was "
            f"{before:.4f} before, a gain of less than growth.min_improvement={self.min_improvement:g}"
        )


class Bar(TrainerCallback):
    """A progress bar with losses, speed and the time left; in a log file, a line at every tenth of a stage.

    What is done is counted in FLOPs, because a step takes longer the larger the model has grown.
    """

    def __init__(self, console: Console, ladder: Ladder, metrics: Metrics) -> None:
        self.console, self.ladder, self.metrics = console, ladder, metrics
        self.progress: Progress | None = None
        self._losses: dict[str, float] = {}
        self._said = (0, 0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[measured]}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console, expand=True)
        self.progress.add_task(
            self._place(state.global_step),
            total=self.ladder.flops(self.ladder.stages[-1].end),
            completed=int(self.ladder.flops(state.global_step)),
            measured=self._measured,
        )
        if self.console.is_terminal:
            self.progress.start()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" not in logs:
            return
        self._losses["loss"] = logs["loss"]
        stage = self.ladder.stage_at(state.global_step - 1)
        tenth = 10 * (state.global_step - stage.start) // stage.steps
        if self._task is not None and not self.console.is_terminal and (stage.number, tenth) > self._said:
            self._said = stage.number, tenth
            left = self._task.time_remaining
            measured = self._measured if left is None else f"{self._measured}  {timedelta(seconds=round(left))} left"
            self.console.print(f"{self._place(state.global_step)}  {measured}", soft_wrap=True, highlight=False)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if "eval_loss" in kwargs["metrics"]:
            self._losses["val"] = kwargs["metrics"]["eval_loss"]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.progress is not None and self._task is not None:
            self.progress.update(
                self._task.id,
                description=self._place(state.global_step),
                completed=self.ladder.flops(state.global_step),
                measured=self._measured,
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    @property
    def _task(self) -> Task | None:
        return self.progress.tasks[0] if self.progress is not None else None

    def _place(self, step: int) -> str:
        stage = self.ladder.stage_at(max(0, step - 1))
        return f"stage {stage.number}/{len(self.ladder.stages)}  step {step}/{self.ladder.stages[-1].end}"

    @property
    def _measured(self) -> str:
        speed = [] if self.metrics.speed is None else [f"{self.metrics.speed:,.0f} {self.ladder.unit}/s"]
        return "  ".join([*(f"{name} {value:.3f}" for name, value in self._losses.items()), *speed])

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
