"""Draw docs/assets/loss-against-compute.svg: what four sizes cost when one model grows, and when each starts anew.

    python docs/assets/loss_against_compute.py

Enters: experiments/progressive_scaling/results.json, and the FLOPs of the runs that it plans. Leaves: the SVG.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent.parent / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

from lab.figures import OURS, THEIRS  # noqa: E402
from lab.results import compute  # noqa: E402
from lab.sizes import SIZES, scratch  # noqa: E402
from progressive_scaling.experiment import BEST, SMALLEST  # noqa: E402

from tokenformer.report.figures import STYLE  # noqa: E402

SIZE_NAMES = ("0.26M", "0.52M", "1.05M", "2.1M (one seed)")
LADDER, ITS_SEEDS = "the same, with half the rate from 128 tokens on", "grown at 2000, then half the rate"
TERA = 1e12


def from_scratch(findings: dict[str, Any]) -> list[tuple[float, float]]:
    """Compute of all sizes so far, and the mean loss over the seeds, for every size."""
    points, spent = [], 0.0
    for tokens in SIZES:
        found = findings["scratch"][str(tokens)]["tokenformer"]
        spent += found["flops"]
        points.append((spent / TERA, found["validation"]["mean"]))
    return points


def grown(findings: dict[str, Any]) -> list[tuple[float, float]]:
    """The same of the ladder. Its smallest size is the one from scratch; its largest was run with one seed."""
    runs = [scratch(SMALLEST, findings["rate"]), *BEST.runs(findings["rate"])]
    points = [from_scratch(findings)[0]]
    for i, tokens in enumerate(SIZES[1:], start=1):
        seeds = [one["sizes"] for one in findings["seeds"][ITS_SEEDS].values() if str(tokens) in one["sizes"]]
        seeds = seeds or [findings["variants"][LADDER]["sizes"]]
        points.append((compute(runs[: i + 1]) / TERA, statistics.mean(one[str(tokens)]["validation"] for one in seeds)))
    return points


def draw(path: Path) -> None:
    """Two lines, each named where it ends, with the size beside every point."""
    findings = json.loads((EXPERIMENTS / "progressive_scaling" / "results.json").read_text())["findings"]
    with matplotlib.rc_context({**STYLE, "font.size": 11, "svg.hashsalt": path.name}):
        figure = Figure(figsize=(7.6, 4.2), layout="constrained", facecolor="white")
        canvas = FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        lines = (
            (from_scratch(findings), THEIRS, "s--", "every size from scratch", (24, 38), "right", (7, 6)),
            (grown(findings), OURS, "o-", "one model that grows", (12, -4), "left", (-9, -15)),
        )
        for points, hue, style, name, offset, side, _ in lines:
            axes.plot(*zip(*points, strict=True), style, color=hue, linewidth=2)
            axes.annotate(
                name, points[-1], offset, textcoords="offset points", color=hue, ha=side, weight="bold", fontsize=11
            )
        beside = {"textcoords": "offset points", "color": "#444444", "fontsize": 9}
        for i, (points, *_, offset) in enumerate(lines):
            for size, point in list(zip(SIZE_NAMES, points, strict=True))[i:]:  # both lines begin at the same point
                axes.annotate(size, point, offset, ha="right" if offset[0] < 0 else "left", **beside)
        share = lines[1][0][-1][0] / lines[0][0][-1][0]
        apart = max(abs(ours / theirs - 1) for (_, theirs), (_, ours) in zip(lines[0][0], lines[1][0], strict=True))
        title = f"Four sizes, 0.26M to 2.1M parameters, for {share:.0%} of the compute (losses within {apart:.1%})"
        axes.set_title(title, loc="left", weight="bold", fontsize=10)
        axes.set_xlabel("compute to train this size and all smaller ones, in 10¹² floating-point operations")
        axes.set_ylabel("validation loss, nats per byte\n(lower is better)")
        axes.set(xlim=(0, 152), ylim=(1.49, 1.72))
        canvas.print_svg(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(HERE / "loss-against-compute.svg")
