"""What the page and the PNGs have in common: units, axes, colours and thinned curves.

Enters: runs. Leaves: curves of [compute, tokens or images, time, value] in the units of the axes, ready to be drawn.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .read import GrowthStep, Moment, Run, TrainingPoint, ValidationPoint

# First Okabe and Ito's colours, which most colour-blind people can tell apart; each for light and for dark paper.
COLOURS = [
    ("#0072b2", "#56a9e0"),
    ("#d55e00", "#f08a4b"),
    ("#009e73", "#35c49a"),
    ("#b8578c", "#df8fbd"),
    ("#7a6a00", "#d9c64a"),
    ("#3d8fc4", "#8fd0f5"),
    ("#5b4ea3", "#a99df0"),
    ("#555555", "#bbbbbb"),
    # Beyond theirs: far from those above and from one another, on either paper.
    ("#660044", "#997788"),
    ("#aa1111", "#dd5566"),
    ("#003366", "#1188bb"),
    ("#004400", "#669900"),
    ("#9977ee", "#aa66cc"),
    ("#998877", "#ffddbb"),
    ("#551188", "#eebbff"),
    ("#553300", "#aa7711"),
]
# Points of one curve. A page or a PNG has fewer pixels across than this.
MOST_POINTS = 1600
# On a linear axis the fall from the untrained loss would press everything after it flat, so the frame begins later.
SKIPPED_SHARE = 0.02
LOSS_LABELS = {"tokens": "loss, nats per token", "images": "loss, nats per image"}

_COUNTS = ["", "k", "M", "B", "T", "Q"]
_FLOPS = ["", "k", "M", "G", "T", "P", "E", "Z", "Y"]
_WORDS = ["", "thousands", "millions", "billions", "trillions", "quadrillions"]

_TIMES = [(1, "seconds", "s"), (60, "minutes", "min"), (3600, "hours", "h"), (86_400, "days", "d")]

Point = tuple[float, ...]  # a place on each axis, in its unit, and the value


@dataclass(frozen=True)
class Axis:
    """A horizontal axis, and the losses to be seen over it when it is linear and when it is logarithmic."""

    name: str  # of the field of a Moment
    title: str
    unit: str
    scale: float
    start: float  # the first point that a logarithmic axis can show
    end: float
    linear_loss: tuple[float, float]
    log_loss: tuple[float, float]

    def place(self, at: Moment) -> float:
        """Where a moment lies on the axis, in its unit."""
        return getattr(at, self.name) / self.scale


def count(number: float) -> str:
    """A count of parameters, tokens or images as this field writes it: 12.3M."""
    digits, power = _three_digits(number, len(_COUNTS))
    return digits + _COUNTS[power]


def flops(number: float) -> str:
    """A number of FLOPs: 4.56 PFLOPs."""
    digits, power = _three_digits(number, len(_FLOPS))
    return f"{digits} {_FLOPS[power]}FLOPs"


def loss(value: float | None) -> str:
    """A loss or an accuracy with three decimals, or a dash."""
    return "–" if value is None else f"{value:.3f}"


def duration(seconds: float) -> str:
    """A time as a clock shows it: 1:02:33."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def growth_label(growth: GrowthStep) -> tuple[str, str]:
    """The label of a growth step: parameters, and validation loss, before and after."""
    parameters = f"{count(growth.parameters_before)} → {count(growth.at.parameters)}"
    return parameters, f"{loss(growth.loss_before)} → {loss(growth.loss_after)}"


def _three_digits(number: float, powers: int) -> tuple[str, int]:
    """A number with three digits, and the power of 1000 that it stands for."""
    power = 0
    while number >= 999.5 and power < powers - 1:
        number, power = number / 1000, power + 1
    return (f"{number:#.3g}".rstrip(".") if power else f"{number:.0f}"), power


def all_axes(runs: Sequence[Run]) -> tuple[Axis, ...]:
    """The axes of compute, of tokens or images and, if all runs measured it, of time that hold all runs."""
    ends = [max(run.last.values(), key=lambda at: at.step) for run in runs]
    _, power = _three_digits(max(at.flops for at in ends), len(_FLOPS))
    unit = f"{_FLOPS[power]}FLOPs"
    compute = _axis(runs, "flops", f"training compute, {unit}", unit, 1000.0**power)
    _, power = _three_digits(max(at.seen for at in ends), len(_WORDS))
    seen = runs[0].unit
    title = f"training {seen}, {_WORDS[power]}" if power else f"training {seen}"
    axes = compute, _axis(runs, "seen", title, f"{_COUNTS[power]} {seen}".strip(), 1000.0**power)
    if not all(at.seconds for at in ends):
        return axes
    longest = max(at.seconds for at in ends)
    scale, word, unit = next(time for time in reversed(_TIMES) if longest >= 3 * time[0] or time[0] == 1)
    return *axes, _axis(runs, "seconds", f"training time, {word}", unit, scale)


def _axis(runs: Sequence[Run], name: str, title: str, unit: str, scale: float) -> Axis:
    measured: list[TrainingPoint | ValidationPoint] = []
    for run in runs:
        measured += run.train
        measured += run.validation
    losses = [(getattr(one.at, name) / scale, one.loss) for one in measured if one.loss is not None]
    end = max(getattr(at, name) for run in runs for at in run.last.values()) / scale
    later = [value for x, value in losses if x >= SKIPPED_SHARE * end]
    return Axis(
        name=name,
        title=title,
        unit=unit,
        scale=scale,
        start=min((x for x, _ in losses if x > 0), default=0.0),
        end=end,
        linear_loss=_padded(later),
        log_loss=_padded([value for x, value in losses if x > 0]),
    )


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def curve(points: Iterable[tuple[Moment, float | None]], axes: Sequence[Axis], unit: float = 1.0) -> list[Point]:
    """The points that have a value, in the units of the axes and of `unit`, and no more than can be seen."""
    measured = [(at, value) for at, value in points if value is not None]
    return [(*(axis.place(at) for axis in axes), value / unit) for at, value in thin(measured)]


def thin(points: Sequence[tuple[Moment, float]]) -> Sequence[tuple[Moment, float]]:
    """The lowest and the highest of every few neighbours, so that spikes stay and every point was measured."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / (MOST_POINTS - 2))
    kept = {0, len(points) - 1}
    for first in range(0, len(points), size):
        group = range(first, min(first + size, len(points)))
        kept |= {min(group, key=lambda i: points[i][1]), max(group, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]
