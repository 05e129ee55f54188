"""A run's measurements, from its folder into plain dataclasses.

Enters: RUN/metrics.jsonl, one JSON object per line in order of time, and RUN/recipe.yaml if there is one. Leaves:
a Run, of text, which counts tokens, or of images. It may still be going: an incomplete last line is skipped, and so are
unknown kinds and fields.
"""

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import BadFileError, BadRequestError

# What validation measures, and its name in metrics.jsonl.
MEASURES = {
    "loss": "validation_loss",
    "bits_per_byte": "validation_bits_per_byte",
    "accuracy": "validation_accuracy",
    "averaged_loss": "ema_validation_loss",
    "averaged_accuracy": "ema_validation_accuracy",
}


@dataclass(frozen=True)
class Moment:
    """Where in a run something was measured. Tokens or images seen, FLOPs and seconds are counted from its beginning.

    The seconds are those of the training steps: neither validation nor a pause between two starts is counted.
    """

    stage: int
    step: int
    seen: float
    flops: float
    parameters: int
    seconds: float = 0.0


@dataclass(frozen=True)
class TrainingPoint:
    """A measurement of training. What was not measured, or was not finite, is None."""

    at: Moment
    loss: float | None
    lr: float | None
    grad_norm: float | None
    per_second: float | None  # tokens or images


@dataclass(frozen=True)
class ValidationPoint:
    """A validation in a stage, at its end, or on either side of a growth step. `averaged_…` is of averaged weights."""

    at: Moment
    loss: float | None
    bits_per_byte: float | None = None
    accuracy: float | None = None
    averaged_loss: float | None = None
    averaged_accuracy: float | None = None


@dataclass(frozen=True)
class GrowthStep:
    """A growth step into the stage of its moment."""

    at: Moment
    method: str
    parameters_before: int
    loss_before: float | None
    loss_after: float | None


@dataclass(frozen=True)
class StageRow:
    """One row of a run's table. What was seen, FLOPs and seconds are the stage's own."""

    number: int
    parameters: int
    seen: float
    flops: float
    seconds: float
    growth: GrowthStep | None
    loss: float | None  # the last one measured in the stage, as are the four below
    bits_per_byte: float | None
    accuracy: float | None
    averaged_loss: float | None
    averaged_accuracy: float | None
    ended: bool
    per_second: float | None  # the median


@dataclass
class Run:
    """Everything the report shows of a run."""

    label: str
    folder: Path
    recipe: str | None = None
    unit: str = "tokens"  # or images: what was seen
    train: list[TrainingPoint] = field(default_factory=list)
    validation: list[ValidationPoint] = field(default_factory=list)
    growths: list[GrowthStep] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)  # stages
    last: dict[int, Moment] = field(default_factory=dict)  # of every stage
    unreadable: int = 0  # lines, not counting a last one that is still being written

    @property
    def stages(self) -> list[StageRow]:
        """The table of stages."""
        rows, seen, flops, seconds = [], 0.0, 0.0, 0.0
        for number, end in sorted(self.last.items()):
            growth = next((growth for growth in self.growths if growth.at.stage == number), None)
            speeds = [one.per_second for one in self.train if one.at.stage == number]
            measured = [speed for speed in speeds if speed is not None]
            rows.append(
                StageRow(
                    number=number,
                    parameters=end.parameters,
                    seen=end.seen - seen,
                    flops=end.flops - flops,
                    seconds=end.seconds - seconds,
                    growth=growth,
                    **{name: self._last(number, name) for name in MEASURES},
                    ended=number in self.ended,
                    per_second=statistics.median(measured) if measured else None,
                )
            )
            seen, flops, seconds = end.seen, end.flops, end.seconds
        return rows

    def _last(self, stage: int, name: str) -> float | None:
        """The last value that validation found in a stage."""
        values = [getattr(one, name) for one in self.validation if one.at.stage == stage]
        return next((value for value in reversed(values) if value is not None), None)


def load_run(folder: str | os.PathLike, label: str | None = None) -> Run:
    """Read a run's folder. Its label is the folder's name unless one is given."""
    folder = Path(os.path.abspath(folder))
    if not folder.is_dir():
        raise BadRequestError(f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}; check the path")
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise BadRequestError(f"{folder} has no metrics.jsonl; give the folder of a training run")
    recipe = folder / "recipe.yaml"
    run = Run(label or folder.name, folder, recipe.read_text("utf-8", errors="replace") if recipe.is_file() else None)
    *lines, unfinished = metrics.read_bytes().split(b"\n")
    for line in lines:
        if line.strip() and not _read_line(run, line):
            run.unreadable += 1
    # The last line may be half written. It counts only if it is whole.
    _read_line(run, unfinished)
    if not run.last:
        raise BadFileError(f"{metrics} has no line that can be read as a measurement")
    return run


def load_runs(folders: Sequence[str | os.PathLike]) -> list[Run]:
    """Read several runs. Those whose folders have the same name are told apart by the folders above."""
    paths = [Path(os.path.abspath(folder)) for folder in folders]
    for path, times in Counter(path.resolve() for path in paths).items():
        if times > 1:
            raise BadRequestError(f"{path} was given {times} times; give every run once")
    runs = [load_run(path, label) for path, label in zip(paths, _labels(paths), strict=True)]
    for run in runs:
        if run.unit != runs[0].unit:
            raise BadRequestError(
                f"{runs[0].label} counts {runs[0].unit} and {run.label} {run.unit}, whose losses cannot be compared; "
                "draw runs of text and of images separately"
            )
    return runs


def _labels(paths: Sequence[Path]) -> list[str]:
    labels = []
    for path in paths:
        others = [other for other in paths if other.name == path.name and other != path]
        length = 1
        while any(other.parts[-length:] == path.parts[-length:] for other in others):
            length += 1
        labels.append("/".join(path.parts[-length:]))
    return labels


def _read_line(run: Run, line: bytes) -> bool:
    """Add a line to the run; False if it is not one of a metrics file."""
    try:
        entry = json.loads(line)
        kind = entry["kind"]
        if kind in READERS:
            if not run.last and "images" in entry:
                run.unit = "images"
            at = Moment(
                stage=int(entry["stage"]),
                step=int(entry["step"]),
                seen=float(entry[run.unit]),
                flops=float(entry["flops"]),
                parameters=int(entry["parameters"]),
            )
            at = replace(at, seconds=_seconds(run, at, entry))
            if not math.isfinite(at.seen) or not math.isfinite(at.flops):
                return False
            READERS[kind](run, at, entry)
            run.last[at.stage] = at
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return False
    return True


def _seconds(run: Run, at: Moment, entry: dict[str, Any]) -> float:
    """The time that training had taken, from the speed since the measurement before."""
    before = run.train[-1].at if run.train else None
    speed = _number(entry.get(f"{run.unit}_per_second")) if entry["kind"] == "train" else None
    since = at.seen - before.seen if before else at.seen
    return (before.seconds if before else 0.0) + (max(0.0, since) / speed if speed and speed > 0 else 0.0)


def _read_train(run: Run, at: Moment, entry: dict[str, Any]) -> None:
    names = ("loss", "lr", "grad_norm", f"{run.unit}_per_second")
    run.train.append(TrainingPoint(at, *(_number(entry.get(name)) for name in names)))


def _read_validation(run: Run, at: Moment, entry: dict[str, Any]) -> None:
    run.validation.append(_validation(at, entry))


def _read_growth(run: Run, at: Moment, entry: dict[str, Any]) -> None:
    left = replace(at, stage=at.stage - 1, parameters=int(entry["parameters_before"]))
    before, after = _validation(left, entry, "_before"), _validation(at, entry, "_after")
    run.growths.append(GrowthStep(at, str(entry["method"]), left.parameters, before.loss, after.loss))
    run.validation += [before, after]


def _validation(at: Moment, entry: dict[str, Any], ending: str = "") -> ValidationPoint:
    return ValidationPoint(at, **{field: _number(entry.get(f"{name}{ending}")) for field, name in MEASURES.items()})


def _read_stage_end(run: Run, at: Moment, entry: dict[str, Any]) -> None:
    _read_validation(run, at, entry)
    run.ended.add(at.stage)


READERS: dict[str, Callable[[Run, Moment, dict[str, Any]], None]] = {
    "train": _read_train,
    "validation": _read_validation,
    "growth": _read_growth,
    "stage_end": _read_stage_end,
}


def _number(value: Any) -> float | None:
    """A number that can be drawn."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
