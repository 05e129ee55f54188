"""The loss curves as PNGs, drawn by matplotlib.

Enters: runs and the axes. Leaves: one PNG for compute and one for tokens or images.
"""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import require
from .curves import COLOURS, LOSS_LABELS, Axis, Point, curve, growth_label
from .read import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Points of 1/72 inch: the height of a growth step's two-line label, and the space between two on one line.
LABEL_HEIGHT, LABEL_GAP = 19, 4
# More lines of labels than this would be unreadable.
MOST_LANES = 4
GREY = "#777777"
DASHES = (0, (3, 3))
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#222222",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.9,
    "text.parse_math": False,  # a dollar sign in a run's name is a dollar sign
}


def draw_losses(runs: Sequence[Run], axes: Sequence[Axis], which: int, log: bool, made_by: str) -> bytes:
    """A PNG of the losses against compute (`which` is 0), or tokens or images (1)."""
    require("drawing", "report")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    axis = axes[which]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.8), dpi=200, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        plot = figure.add_subplot()
        plot.set(xlabel=axis.title, ylabel=LOSS_LABELS[runs[0].unit], ylim=axis.log_loss if log else axis.linear_loss)
        log = log and 0 < axis.start < axis.end
        if log:
            plot.set_xscale("log", nonpositive="mask")
            plot.set_xlim(axis.start, axis.end * 1.05)
            plot.xaxis.set_major_formatter("{x:g}")
            plot.set_xlabel(f"{axis.title}, logarithmic")
        else:
            plot.set_xlim(0, axis.end * 1.02 or 1)
        named = []
        for i, run in enumerate(runs):
            colour = COLOURS[i % len(COLOURS)][0]
            training = curve(((one.at, one.loss) for one in run.train), axes)
            validation = curve(((one.at, one.loss) for one in run.validation), axes)
            plot.plot(*_columns(training, which), color=colour, lw=0.6, alpha=0.6 if validation else 1)
            (line,) = plot.plot(*_columns(validation, which), "o-", color=colour, lw=1.5, ms=2.4)
            named.append((run.label, line))
            for growth in run.growths:
                plot.axvline(axis.place(growth.at), color=colour, lw=0.8, ls=DASHES, alpha=0.8)
        canvas.draw()  # the layout has to be known before labels can be placed beside one another
        growth_name = "growth: parameters, validation loss" if _label_growth(plot, runs, axis) else "growth"
        named += [
            ("validation", Line2D([], [], lw=1.5, marker="o", ms=2.4, color=GREY)),
            ("training", Line2D([], [], lw=0.6, alpha=0.6, color=GREY)),
            (growth_name, Line2D([], [], lw=0.8, ls=DASHES, color=GREY)),
        ]
        names, lines = zip(*named, strict=True)
        plot.legend(lines, names, loc="lower left" if log else "upper right", fontsize=8)
        picture = io.BytesIO()
        figure.savefig(picture, metadata={"Software": made_by}, format="png")
        return picture.getvalue()


def _columns(points: Sequence[Point], which: int) -> tuple[list[float], list[float]]:
    return [point[which] for point in points], [point[-1] for point in points]


def _label_growth(plot: "Axes", runs: Sequence[Run], axis: Axis) -> bool:
    """Write each label above its growth step, in the lowest lane that has room for it; if too many, write none."""
    ends: list[float] = []  # of the last label in each lane, in pixels
    labels = []
    gap = LABEL_GAP * plot.figure.dpi / 72
    steps = [(growth, i) for i, run in enumerate(runs) for growth in run.growths]
    for growth, i in sorted(steps, key=lambda step: axis.place(step[0].at)):
        text = plot.annotate(
            "\n".join(growth_label(growth)),
            (axis.place(growth.at), 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=6.5,
            linespacing=1.15,
            color=COLOURS[i % len(COLOURS)][0],
        )
        box = text.get_window_extent()
        lane = next((lane for lane, end in enumerate(ends) if end + gap <= box.x0), len(ends))
        ends[lane : lane + 1] = [box.x1]
        text.xyann = (0, 2 + lane * LABEL_HEIGHT)
        labels.append(text)
    if len(ends) > MOST_LANES:
        for text in labels:
            text.remove()
    return 0 < len(ends) <= MOST_LANES
