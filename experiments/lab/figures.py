"""Figures of the experiments: one look for all of them.

Enters: a function that draws on axes. Leaves: a PNG beside the experiment.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from tokenformer.report.curves import COLOURS
from tokenformer.report.figures import STYLE

OURS, THEIRS = COLOURS[0][0], COLOURS[1][0]


def colour(i: int) -> str:
    """The i-th colour."""
    return COLOURS[i % len(COLOURS)][0]


def plain_ticks(axis: Any, ticks: Sequence[float] = ()) -> None:
    """Plain numbers beside an axis with a logarithmic scale; `ticks` says where, if it should be somewhere else."""
    if ticks:
        axis.set_major_locator(FixedLocator(list(ticks)))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(NullFormatter())


def legend(axes: Any) -> None:
    """A legend, if anything was drawn that has a name."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7)


def draw(path: Path, panels: Sequence[Callable[[Any], None]], size: tuple[float, float] = (5.2, 3.8)) -> None:
    """Panels beside each other in one PNG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(size[0] * len(panels), size[1]), dpi=150, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        for i, panel in enumerate(panels):
            panel(figure.add_subplot(1, len(panels), i + 1))
        canvas.print_png(path)
