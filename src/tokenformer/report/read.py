"""A run's measurements, from its folder into plain dataclasses.

Enters: RUN/metrics.jsonl, one JSON object a line in the order of time, and RUN/recipe.yaml if it is there. Leaves: a
Run. The run may still be going: a last line that is cut off is left out, and so are kinds and fields not known here.
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


@dataclass(frozen=True)
class Moment:
    """Where in a run something was measured. Tokens and FLOPs are counted from the run's beginning."""

    stage: int
    step: int
    tokens: float
    flops: float
    parameters: int


@dataclass(frozen=True)
class Train:
    """A measurement of training. What was not measured, or was not finite, is None."""

    at: Moment
    loss: float | None
    lr: float | None
    grad_norm: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class Validation:
    """A validation loss: during a stage, at its end, or on either side of a growth step."""

    at: Moment
    loss: float | None


@dataclass(frozen=True)
class Growth:
    """A growth step into the stage of its moment."""

    at: Moment
    method: str
    parameters_before: int
    loss_before: float | None
    loss_after: float | None


@dataclass(frozen=True)
class Stage:
    """One row of a run's table. Tokens and FLOPs are the stage's own."""

    number: int
    parameters: int
    tokens: float
    flops: float
    growth: Growth | None
    loss: float | None  # the last one measured in the stage
    ended: bool
    tokens_per_second: float | None  # the median


@dataclass
class Run:
    """Everything the report shows of a run."""

    label: str
    folder: Path
    recipe: str | None = None
    train: list[Train] = field(default_factory=list)
    validation: list[Validation] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)  # stages
    last: dict[int, Moment] = field(default_factory=dict)  # of every stage
    unreadable: int = 0  # lines, without a last one that is still being written

    @property
    def stages(self) -> list[Stage]:
        """The table of stages."""
        rows, tokens, flops = [], 0.0, 0.0
        for number, end in sorted(self.last.items()):
            growth = next((growth for growth in self.growths if growth.at.stage == number), None)
            losses = [one.loss for one in self.validation if one.at.stage == number and one.loss is not None]
            speeds = [one.tokens_per_second for one in self.train if one.at.stage == number]
            measured = [speed for speed in speeds if speed is not None]
            rows.append(
                Stage(
                    number=number,
                    parameters=end.parameters,
                    tokens=end.tokens - tokens,
                    flops=end.flops - flops,
                    growth=growth,
                    loss=losses[-1] if losses else None,
                    ended=number in self.ended,
                    tokens_per_second=statistics.median(measured) if measured else None,
                )
            )
            tokens, flops = end.tokens, end.flops
        return rows


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
    # The last line may have been caught in the middle of being written. It is whole, or it does not count.
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
    return [load_run(path, label) for path, label in zip(paths, _labels(paths), strict=True)]


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
            at = Moment(
                stage=int(entry["stage"]),
                step=int(entry["step"]),
                tokens=float(entry["tokens"]),
                flops=float(entry["flops"]),
                parameters=int(entry["parameters"]),
            )
            if not math.isfinite(at.tokens) or not math.isfinite(at.flops):
                return False
            READERS[kind](run, at, entry)
            run.last[at.stage] = at
    except (ValueError, TypeError, KeyError, OverflowError):
        return False
    return True


def _read_train(run: Run, at: Moment, entry: dict[str, Any]) -> None:
    names = ("loss", "lr", "grad_norm", "tokens_per_second")
    run.train.append(Train(at, *(_number(entry.get(name)) for name in names)))


def _read_validation(run: Run, at: Moment, entry: dict[str, Any]) -> None:
    run.validation.append(Validation(at, _number(entry.get("validation_loss"))))


def _read_growth(run: Run, at: Moment, entry: dict[str, Any]) -> None:
    before, after = (_number(entry.get(name)) for name in ("validation_loss_before", "validation_loss_after"))
    growth = Growth(at, str(entry["method"]), int(entry["parameters_before"]), before, after)
    run.growths.append(growth)
    left = replace(at, stage=at.stage - 1, parameters=growth.parameters_before)
    run.validation += [Validation(left, before), Validation(at, after)]


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
