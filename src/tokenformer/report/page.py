"""The report as one HTML page that needs no other file and no network.

Enters: runs and the two axes. Leaves: the page's text. page.css and page.js beside this file go into it; the figures
are drawn by page.js from the numbers that are written here.
"""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from .curves import COLOURS, LOSS_LABELS, MOST_POINTS, Axis, Point, count, curve, flops, growth_label, loss
from .read import Run, Stage

# What validation of some runs has beside the loss of the weights, and how it is called.
MORE = {
    "accuracy": "val.<br>accuracy",
    "averaged_loss": "val. loss,<br>averaged",
    "averaged_accuracy": "accuracy,<br>averaged",
}


def page(runs: Sequence[Run], axes: tuple[Axis, Axis], log: bool, made_by: str) -> str:
    """The whole page. Its figures begin with logarithmic axes if `log`."""
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    wide = "".join(
        f'<figure class="wide" id="loss-{x}" data-x="{x}"><figcaption>Loss against {what}</figcaption></figure>'
        for x, what in (("flops", "training compute"), ("seen", f"training {runs[0].unit}"))
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="{made_by}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{html.escape(title)}: training report</title>
<style>
{_beside("page.css")}{_colours()}</style>
</head>
<body>
<h1>Training report: {html.escape(title)}</h1>
{_overview(runs)}
<div id="controls">
<label><input type="checkbox" id="log" autocomplete="off"> logarithmic axes of compute and {runs[0].unit}</label>
<label><input type="checkbox" id="training" autocomplete="off"> training loss</label>
</div>
<noscript><p>The figures of this page are drawn by its script, which is switched off here. The losses are also in
loss-vs-compute.png and loss-vs-{runs[0].unit}.png.</p></noscript>
{wide}
<p class="quiet">Thick lines with dots: validation loss. Thin lines: training loss. Dashed: a growth step, with the
parameters and the validation loss before → after. With linear axes the first losses may lie above the frame.
<span class="screen">Point at a figure for its values, drag across it to zoom, double-click to return.</span></p>
{"".join(_section(i, run) for i, run in enumerate(runs))}
<script type="application/json" id="data">{_numbers(runs, axes, log)}</script>
<script>
{_beside("page.js")}</script>
</body>
</html>
"""


def _beside(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _colours() -> str:
    """A run's colour as a CSS variable, on light paper and, on a screen, on dark."""
    light, dark = ("".join(f"--run-{i}:{pair[k]};" for i, pair in enumerate(COLOURS)) for k in (0, 1))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _overview(runs: Sequence[Run]) -> str:
    """A row a run, with the box that shows or hides it in the figures."""
    rows, classifies = [], runs[0].unit == "images"
    for i, run in enumerate(runs):
        stages = run.stages
        sizes = dict.fromkeys(count(stage.parameters) for stage in (stages[0], stages[-1]))
        name = (
            f'<label style="--run: var(--run-{i % len(COLOURS)})"><input type="checkbox" autocomplete="off" checked> '
            f'<i class="swatch"></i> {html.escape(run.label)}</label>'
        )
        cells = [str(len(stages)), " → ".join(sizes), *_totals(stages), _final_loss(stages[-1])]
        if classifies:
            cells.append(loss(stages[-1].accuracy))
        rows.append(_row(name, *cells))
    columns = ["run", "stages", "parameters", runs[0].unit, "training FLOPs", "last val. loss"]
    if classifies:
        columns.append("last val. accuracy")
    return f'<div class="scroll" id="runs">{_table(columns, rows)}</div>'


def _section(number: int, run: Run) -> str:
    """What the page has of one run: its table of stages, small charts and recipe."""
    stages = run.stages
    more = [name for name in MORE if any(getattr(stage, name) is not None for stage in stages)]
    columns = (
        "stage",
        "grown by",
        "parameters",
        run.unit,
        "training FLOPs",
        "val. loss<br>before growth",
        "val. loss<br>after growth",
        "val. loss<br>at the end",
        f"{run.unit}/s<br>(median)",
        *(MORE[name] for name in more),
    )
    rows = [_stage_row(stage, more) for stage in stages]
    total = _row("all", "", "", *_totals(stages), *[""] * (4 + len(more))) if len(stages) > 1 else ""
    charts = "".join(
        f'<figure id="{name}-{number}" data-panel="{name}" data-run="{number}" data-x="seen">'
        f"<figcaption>{caption}{_panel_unit(run, name)[1]}</figcaption></figure>"
        for name, caption in _panels(run).items()
    )
    notes = []
    if not stages[-1].ended:
        notes.append(f"Stage {stages[-1].number} has not ended.")
    if run.unreadable:
        notes.append(f"Lines of metrics.jsonl that could not be read: {run.unreadable}.")
    if len(run.train) > MOST_POINTS:
        notes.append("Of neighbouring measurements the lowest and the highest are drawn.")
    recipe = "<p class='quiet'>The run has no recipe.yaml.</p>"
    if run.recipe is not None:
        recipe = f"<details><summary>Resolved recipe</summary><pre>{html.escape(run.recipe)}</pre></details>"
    return f"""<section style="--run: var(--run-{number % len(COLOURS)})">
<h2><i class="swatch"></i> {html.escape(run.label)}</h2>
<p class="quiet"><span class="path">{html.escape(str(run.folder))}</span> {" ".join(notes)}</p>
<div class="scroll">{_table(columns, rows, total)}</div>
<div class="panels">{charts}</div>
{recipe}
</section>
"""


def _panels(run: Run) -> dict[str, str]:
    """The small charts of a run: the field of a measurement, and what stands above its chart."""
    panels = {"lr": "learning rate", "grad_norm": "gradient norm", "per_second": f"{run.unit} per second"}
    for name, caption in (("accuracy", "accuracy"), ("averaged_accuracy", "accuracy of the averaged weights")):
        if any(getattr(one, name) is not None for one in run.validation):
            panels[name] = f"validation {caption}"
    return panels


def _stage_row(stage: Stage, more: Sequence[str]) -> str:
    growth = stage.growth
    return _row(
        str(stage.number),
        html.escape(growth.method) if growth else "–",
        f"{stage.parameters:,}",
        count(stage.seen),
        flops(stage.flops),
        loss(growth.loss_before if growth else None),
        loss(growth.loss_after if growth else None),
        _final_loss(stage),
        "–" if stage.per_second is None else f"{stage.per_second:,.0f}",
        *(loss(getattr(stage, name)) for name in more),
    )


def _totals(stages: Sequence[Stage]) -> tuple[str, str]:
    return count(sum(stage.seen for stage in stages)), flops(sum(stage.flops for stage in stages))


def _final_loss(stage: Stage) -> str:
    return loss(stage.loss) + ("" if stage.ended or stage.loss is None else " so far")


def _row(*cells: str) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _table(columns: Sequence[str], rows: Sequence[str], total: str = "") -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    foot = f"<tfoot>{total}</tfoot>" if total else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>{foot}</table>"


def _panel_unit(run: Run, name: str) -> tuple[float, str]:
    """The power of ten that a small chart's values are written in, and how its title says so."""
    values = [value for one in run.train if (value := getattr(one, name, None))]
    largest = max(values, default=1.0)
    if name == "lr" and largest < 0.01:
        power = math.floor(math.log10(largest))
        return 10.0**power, f", 10⁻{str(-power).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    if name == "per_second" and largest >= 10_000:
        return 1000.0, ", thousands"
    return 1.0, ""


def _numbers(runs: Sequence[Run], axes: tuple[Axis, Axis], log: bool) -> str:
    """What page.js draws, as JSON that cannot end the script element it stands in."""
    drawn = {
        "log": log,
        "colours": len(COLOURS),
        "loss_label": LOSS_LABELS[runs[0].unit],
        "axes": [asdict(axis) for axis in axes],
        "runs": [_run_numbers(run, axes) for run in runs],
    }
    return json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _run_numbers(run: Run, axes: tuple[Axis, Axis]) -> dict[str, Any]:
    curves: dict[str, list[Point]] = {
        "training": curve(((one.at, one.loss) for one in run.train), axes),
        "validation": curve(((one.at, one.loss) for one in run.validation), axes),
    }
    measured: list[Any] = [*run.train, *run.validation]
    for name in _panels(run):
        points = [(one.at, getattr(one, name)) for one in measured if hasattr(one, name)]
        curves[name] = curve(points, axes, _panel_unit(run, name)[0])
    growths = []
    for growth in run.growths:
        parameters, losses = growth_label(growth)
        at = [axis.place(growth.at) for axis in axes]
        growths.append({"at": at, "method": growth.method, "parameters": parameters, "loss": losses})
    rounded = {name: [[float(f"{x:.6g}") for x in point] for point in points] for name, points in curves.items()}
    return {"label": run.label, "growths": growths, **rounded}
