"""Train one segment of a run, on one thread, and go on where it was left.

Enters: a segment, and the state at the end of the one before it. Leaves, in runs/lab/NAME: state.pt and result.json
with every measurement; on the way part.pt, written anew every minute or so, from which a killed segment goes on.

Not transformers' Trainer: here runs share segments, and their models are ours, transformers' and mixtures of both. The
learning itself is the same: AdamW, gradients clipped to 1, the same rates as the ladder of `tokenformer train`.
"""

import json
import math
import os
import tempfile
import time
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from suite import circumstances
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tokenformer.io import replace_file
from tokenformer.training.held_rows import FrozenRows, NewTokenWarmup
from tokenformer.training.nested import nest

from .adapters import with_adapter
from .data import TextTask
from .images import ImageTask
from .models import build, grow_both, optimizer_of, set_tau, tau_targets
from .spec import Growth, Run, Segment, TokenViT, ViT

STORE = Path(os.environ.get("LAB", Path(__file__).parents[2] / "runs" / "lab"))
LOG_STEPS, VALIDATION_STEPS, SAVE_STEPS = 50, 100, 100
KEPT: dict[str, dict[str, Any]] = {}  # results by the segment's name; `kept.take` puts them here
SMOOTH_STEPS = 20  # after growth, in which the training loss is compared with that of the model that did not grow
FEW, SOME, MANY = 64, 128, 512  # blocks that a validation looks at: on the way, at growth, at the end of a run


def folder_of(segment: Segment) -> Path:
    """Where a segment's state and measurements lie."""
    return STORE / segment.name


def result_of(segment: Segment) -> dict[str, Any] | None:
    """What a finished segment measured, here or, where that is kept, on another machine."""
    return trained(segment) or KEPT.get(segment.name)


def trained(segment: Segment) -> dict[str, Any] | None:
    """What a segment measured whose state is here too."""
    path = folder_of(segment) / "result.json"
    return _read_result(path) if path.exists() else None


def add_to_result(segment: Segment, line: dict[str, Any]) -> None:
    """Note what was found out about a finished segment's state, so that others need not have the state."""
    path = folder_of(segment) / "result.json"
    result = json.loads(path.read_text())
    replace_file(path, json.dumps({**result, "lines": [*result["lines"], line]}))
    _read_result.cache_clear()


@cache
def _read_result(path: Path) -> dict[str, Any]:
    """Plans and reports ask for the same results again and again; only `add_to_result` changes them."""
    return json.loads(path.read_text())


def first_model(run: Run) -> Any:
    """The model that makes a run's first step: a fresh one, or a finished one with an adapter beside it."""
    if run.begins is None:
        return build(run.model, run.context)
    return with_adapter(finished_model(run.begins), run).train()


def finished_model(run: Run) -> Any:
    """The model at the end of a run."""
    model = first_model(run)
    optimizer = optimizer_of(model, run)
    segments = run.segments()
    for growth in run.growths:
        if growth.adopts:
            # Its record shall say how much ballast the weights needed that were adopted.
            _load_weights(model, next(segment for segment in segments if segment.end == growth.step))
        model, optimizer = grow_both(model, optimizer, growth, run)
    _load_weights(model, segments[-1])
    return model.eval()


def _load_weights(model: nn.Module, segment: Segment) -> None:
    """Those at the end of a segment."""
    model.load_state_dict(torch.load(folder_of(segment) / "state.pt", weights_only=True)["model"])


class Training:
    """The state of a run at some step."""

    def __init__(self, segment: Segment) -> None:
        self.segment, self.run = segment, segment.run
        self.folder, self.step = folder_of(segment), 0
        self.lines: list[dict[str, Any]] = []
        torch.manual_seed(self.run.seed)
        self.model = first_model(self.run)
        self.optimizer = optimizer_of(self.model, self.run)
        self.growth: Growth | None = None
        self.taus: dict[str, tuple[float, float]] | None = None
        self.frozen: FrozenRows | None = None
        self.rising: NewTokenWarmup | None = None
        for growth in self.run.growths:
            if growth.step < segment.start:
                self._grow(growth)
        self.task, self.old = task_of(self.run), old_task_of(self.run)
        growth = next((growth for growth in self.run.growths if growth.step == segment.start), None)
        part, ungrown = self.folder / "part.pt", None
        if part.exists():  # saved after the growth with which the segment starts
            if growth is not None:
                self._grow(growth)
            state = self._load(part)
            self.lines, self.taus = json.loads(state["lines"]), json.loads(state["taus"])
        else:
            if segment.before is not None:
                self._load(folder_of(segment.before) / "state.pt")
            if growth is not None:
                # The end of the segment before may have been measured on more blocks.
                before, ungrown = self.validate("validation", SOME), self._first_losses()
                self._grow(growth)
                after = self.validate("validation", SOME)
                self.measure("growth", **after, rise=after["loss"] - before["loss"])
        if self.growth is not None and self.growth.trains == "new":
            self.frozen = FrozenRows(self.model, self.model.last_growth)
        if self.growth is not None and self.growth.warm_new:
            self.rising = NewTokenWarmup(self.model, self.model.last_growth)
        ramp = self.growth is not None and self.growth.tau_steps and self.growth.step == segment.start
        if ramp and self.taus is None:
            self.taus = tau_targets(self.model)
        if self.run.nested:
            nest(self.model, self.run.nested)
        if ungrown is not None:
            self.lines[-1]["above_ungrown"] = [a - b for a, b in zip(self._first_losses(), ungrown, strict=True)]

    def _grow(self, growth: Growth) -> None:
        self.model, self.optimizer = grow_both(self.model, self.optimizer, growth, self.run)
        self.growth = growth

    def _first_losses(self) -> list[float]:
        """The training losses of the next steps, which are then undone."""
        before = deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        step, lines = self.step, list(self.lines)
        losses = [self.make_step()[0].item() for _ in range(SMOOTH_STEPS)]
        self.step, self.lines = step, lines
        self.model.load_state_dict(before[0])
        self.optimizer.load_state_dict(before[1])
        return losses

    def _load(self, path: Path) -> dict[str, Any]:
        """Take over a saved state."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        return state

    def save(self, name: str) -> None:
        """Write the state beside its place and put it there."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        notes = {"lines": json.dumps(self.lines), "taus": json.dumps(self.taus)}
        torch.save({**state, **notes}, self.folder / f"{name}.new")
        (self.folder / f"{name}.new").rename(self.folder / name)

    def measure(self, kind: str, loss: float, **more: Any) -> None:
        """Note a measurement."""
        self.lines.append({"kind": kind, "step": self.step, "loss": loss, **more})

    def validate(self, part: str, count: int) -> dict[str, float]:
        """What `score` says of the model as it is, and of one that began as another also its loss on the old text."""
        found = score(self.model.eval(), self.task, part, count)
        if self.old is not None:
            found["old_loss"] = score(self.model, self.old, part, count)["loss"]
        self.model.train()
        return found

    def make_step(self) -> tuple[Tensor, Tensor]:
        """One step of the optimizer. Returns the loss and the norm of the gradient before it was clipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * self.run.learning_rate(self.step)
        if self.taus is not None and self.growth is not None:
            set_tau(self.model, self.taus, (self.step + 1 - self.growth.step) / self.growth.tau_steps)
        loss = self.model(**self.task.batch(self.step)).loss
        loss.backward()
        if self.frozen is not None:
            self.frozen.clear_gradients()
        if (self.step + 1) % VALIDATION_STEPS == 0:
            self.lines.append({"kind": "gradients", "step": self.step + 1, "norms": gradient_norms(self.model)})
        norm = clip_grad_norm_(self.model.parameters(), 1.0)
        rising = self._rising_share()
        if rising < 1:
            self.rising.before_step()
        self.optimizer.step()
        if rising < 1:
            self.rising.scale_step(rising)
        self.optimizer.zero_grad(set_to_none=True)
        if self.frozen is not None:
            self.frozen.put_back()
        self.step += 1
        return loss.detach(), norm

    def _rising_share(self) -> float:
        """How far new tokens may move in this step, of what they would."""
        if self.rising is None or self.growth is None:
            return 1.0
        return (self.step - self.growth.step + 1) / (self.growth.warm_new + 1)

    def finish(self) -> None:
        """Train to the end of the segment."""
        losses: list[float] = []
        began, steps = time.perf_counter(), 0
        while self.step < self.segment.end:
            loss, norm = self.make_step()
            steps += 1
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                self.measure("broken", losses[-1])
                break
            if self.step % LOG_STEPS == 0:
                self.measure("train", sum(losses) / len(losses), gradient=norm.item())
                losses = []
            if self.step % VALIDATION_STEPS == 0:
                self.measure("validation", **self.validate("validation", FEW))
            if self.step % SAVE_STEPS == 0:
                self.save("part.pt")
        is_last = self.segment.end == self.run.steps
        seconds = (time.perf_counter() - began) / max(1, steps)
        count = MANY if is_last else SOME
        more = {"seconds_per_step": seconds}
        if self.run.adapter is not None:
            more["trained"] = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.measure("end", **self.validate("validation", count), **more)
        if is_last:
            self.measure("test", **self.validate("test", MANY))
            for share in sorted({*self.run.nested} - {1.0}):
                part, sizes = prefix_of(self.model, share), {"share": share}
                for name, of in (("end", "validation"), ("test", "test")):
                    sizes[name] = score(part, self.task, of, MANY)["loss"]
                self.measure("prefix", sizes["end"], **sizes)
        self.save("state.pt")
        what = {"run": asdict(self.run), "start": self.segment.start, "end": self.segment.end}
        result = {**what, "made": circumstances(), "lines": self.lines}
        replace_file(self.folder / "result.json", json.dumps(result))
        (self.folder / "part.pt").unlink(missing_ok=True)


def prefix_of(model: Any, share: float) -> Any:
    """The model that a share of a nested model's tokens is, as it is loaded from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, token_fraction=share).eval()


@torch.no_grad()
def score(model: Any, task: TextTask | ImageTask, part: str, count: int) -> dict[str, float]:
    """The loss on what is not trained on: nats a byte, or nats an image, and then also how many are right."""
    sums: dict[str, float] = {}
    total = 0
    for size, inputs in task.held_out(part, count):
        output, total = model(**inputs), total + size
        found = {"loss": output.loss.item() * size}
        if "pixel_values" in inputs:
            found["accuracy"] = (output.logits.argmax(-1) == inputs["labels"]).sum().item()
        sums = {key: sums.get(key, 0.0) + value for key, value in found.items()}
    return {key: value / total for key, value in sums.items()}


def task_of(run: Run) -> TextTask | ImageTask:
    """What a run trains on."""
    if isinstance(run.model, TokenViT | ViT):
        return ImageTask(run.batch, run.seed, run.steps * run.batch)
    return TextTask(run.text, run.context, run.batch, run.seed)


def old_task_of(run: Run) -> TextTask | None:
    """What the model was trained on that a run begins with; None if that is a fresh one."""
    return None if run.begins is None else TextTask(run.old_text, run.context, run.batch, run.seed)


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """The norm of every parameter's gradient."""
    named = model.named_parameters()
    return {name: float(f"{p.grad.norm().item():.4g}") for name, p in named if p.grad is not None}
