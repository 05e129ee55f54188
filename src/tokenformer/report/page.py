"""The report of one or several runs: one HTML page that needs no other file and no network, and two pictures.

Enters: runs. Leaves: report.html, loss-vs-compute.png and loss-vs-tokens.png (loss-vs-images.png for images) in one
folder, where they replace an earlier report once all are on the disk, or leave it as it was. page.css and page.js
beside this file go into the page; its figures are drawn by page.js from the numbers that are written here.

    tokenformer report RUN… --out FOLDER
"""

import html
import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import BadRequestError
from ..io import naming, replace_files
from .curves import (
    COLOURS,
    LOSS_LABELS,
    MOST_POINTS,
    Axis,
    Point,
    all_axes,
    count,
    curve,
    duration,
    flops,
    growth_label,
    loss,
)
from .figures import draw_losses
from .read import Run, StageRow

# Written near the beginning of each file, to tell our reports from other people's files.
MADE_BY = "tokenformer report"
# What some runs validate besides the loss of the weights, and what the table calls it.
MORE = {
    "bits_per_byte": "val. bits<br>per byte",
    "accuracy": "val.<br>accuracy",
    "averaged_loss": "val. loss,<br>averaged",
    "averaged_accuracy": "accuracy,<br>averaged",
}
# The absolute path in a line of a recipe, which is shown without the folders above: they are nobody else's business.
ABSOLUTE_PATH = re.compile(
    r"""^(\s*(?:- )*(?:[\w-]+: )?["']?)(?:/|~|[A-Za-z]:[\\/])(?:.*[\\/])?(?=[^\\/])""", re.MULTILINE
)


def write_report(runs: Sequence[Run], folder: str | os.PathLike, log: bool = False) -> list[Path]:
    """Write the report into a folder, with logarithmic horizontal axes if `log`."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise BadRequestError(f"{folder} is not a folder; give another --out")
    targets = [folder / name for name in ("report.html", "loss-vs-compute.png", f"loss-vs-{runs[0].unit}.png")]
    for target in targets:
        if os.path.lexists(target) and not _is_ours(target):
            raise BadRequestError(
                f"{target} was not written by this command and would be overwritten; give another --out"
            )
    axes = all_axes(runs)
    contents = [
        page(runs, axes, log, MADE_BY).encode(),
        *(draw_losses(runs, axes, which, log, MADE_BY) for which in range(2)),
    ]
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
        replace_files(dict(zip(targets, contents, strict=True)))
    except BaseException:
        with suppress(OSError):  # what another process has put something into stays
            for place in made:
                place.rmdir()
        raise
    return targets


def page(runs: Sequence[Run], axes: Sequence[Axis], log: bool, made_by: str) -> str:
    """The whole page. Its figures begin with logarithmic axes if `log`."""
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    wide = "".join(
        f'<figure class="wide" id="loss-{axis.name}" data-x="{axis.name}">'
        f"<figcaption>Loss against {axis.title.partition(',')[0]}</figcaption></figure>"
        for axis in axes
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
<label><input type="checkbox" id="log" autocomplete="off"> logarithmic horizontal axes</label>
<label><input type="checkbox" id="training" autocomplete="off"> training loss</label>
</div>
<noscript><p>The figures of this page are drawn by its script, which is switched off here. The losses are also in
loss-vs-compute.png and loss-vs-{runs[0].unit}.png.</p></noscript>
{wide}
<p class="quiet">Thick lines with dots: validation loss. Thin lines: training loss. Dashed: a growth step, with the
parameters and the validation loss before → after. With linear axes the first losses may lie above the frame. Time is
that of the training steps, without validation.
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
    """One row per run, with the box that shows or hides it in the figures."""
    rows, ends = [], [run.stages[-1] for run in runs]
    titles = {"bits_per_byte": "last val. bits<br>per byte", "accuracy": "last val.<br>accuracy"}
    more = [name for name in titles if any(getattr(end, name) is not None for end in ends)]
    for i, run in enumerate(runs):
        stages = run.stages
        sizes = dict.fromkeys(count(stage.parameters) for stage in (stages[0], stages[-1]))
        name = (
            f'<label style="--run: var(--run-{i % len(COLOURS)})"><input type="checkbox" autocomplete="off" checked> '
            f'<i class="swatch"></i> {html.escape(run.label)}</label>'
        )
        last = [_final_loss(stages[-1]), *(loss(getattr(stages[-1], field)) for field in more)]
        rows.append(_row(name, str(len(stages)), " → ".join(sizes), *_totals(stages), *last))
    columns = ["run", "stages", "parameters", runs[0].unit, "training FLOPs", "time", "last val.<br>loss"]
    columns += [titles[name] for name in more]
    return f'<div class="scroll" id="runs">{_table(columns, rows)}</div>'


def _section(number: int, run: Run) -> str:
    """The section of one run: its table of stages, small charts and recipe."""
    stages = run.stages
    more = [name for name in MORE if any(getattr(stage, name) is not None for stage in stages)]
    columns = (
        "stage",
        "grown by",
        "parameters",
        run.unit,
        "training<br>FLOPs",
        "time",
        "val. loss<br>before<br>growth",
        "val. loss<br>after<br>growth",
        "val. loss<br>at the<br>end",
        f"{run.unit}/s<br>(median)",
        *(MORE[name] for name in more),
    )
    rows = [_stage_row(stage, more) for stage in stages]
    total = _row("all", "", "", *_totals(stages), *[""] * (4 + len(more))) if len(stages) > 1 else ""
    charts = "".join(
        f'<figure id="{name}-{number}" data-panel="{name}" data-run="{number}" data-x="seen"'
        f' data-label="{label}{_panel_unit(run, name)[1]}"><figcaption>{caption}</figcaption></figure>'
        for name, (caption, label) in _panels(run).items()
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
        shown = ABSOLUTE_PATH.sub(r"\1…/", run.recipe)
        recipe = f"<details><summary>Resolved recipe</summary><pre>{html.escape(shown)}</pre></details>"
    return f"""<section style="--run: var(--run-{number % len(COLOURS)})">
<h2><i class="swatch"></i> {html.escape(run.label)}</h2>
<p class="quiet">{" ".join(notes)}</p>
<div class="scroll">{_table(columns, rows, total)}</div>
<div class="panels">{charts}</div>
{recipe}
</section>
"""


def _panels(run: Run) -> dict[str, tuple[str, str]]:
    """The small charts of a run: the field of a measurement, the title of its chart, and the label of its axis."""
    panels = {
        "lr": ("Learning rate", "learning rate"),
        "grad_norm": ("Gradient norm", "norm"),
        "per_second": ("Speed", f"{run.unit}/s"),
    }
    more = {
        "bits_per_byte": ("Validation loss in bits per byte", "bits per byte"),
        "accuracy": ("Validation accuracy", "accuracy"),
        "averaged_accuracy": ("Validation accuracy of the averaged weights", "accuracy"),
    }
    for name, words in more.items():
        if any(getattr(one, name) is not None for one in run.validation):
            panels[name] = words
    return panels


def _stage_row(stage: StageRow, more: Sequence[str]) -> str:
    growth = stage.growth
    return _row(
        str(stage.number),
        html.escape(growth.method) if growth else "–",
        f"{stage.parameters:,}",
        count(stage.seen),
        flops(stage.flops),
        _time(stage.seconds),
        loss(growth.loss_before if growth else None),
        loss(growth.loss_after if growth else None),
        _final_loss(stage),
        "–" if stage.per_second is None else f"{stage.per_second:,.0f}",
        *(loss(getattr(stage, name)) for name in more),
    )


def _totals(stages: Sequence[StageRow]) -> tuple[str, str, str]:
    seen, compute, seconds = (sum(getattr(one, name) for one in stages) for name in ("seen", "flops", "seconds"))
    return count(seen), flops(compute), _time(seconds)


def _time(seconds: float) -> str:
    return duration(seconds) if seconds else "–"


def _final_loss(stage: StageRow) -> str:
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


def _numbers(runs: Sequence[Run], axes: Sequence[Axis], log: bool) -> str:
    """What page.js draws, as JSON that cannot end the script element around it."""
    drawn = {
        "log": log,
        "colours": len(COLOURS),
        "loss_label": LOSS_LABELS[runs[0].unit],
        "axes": [asdict(axis) for axis in axes],
        "runs": [_run_numbers(run, axes) for run in runs],
    }
    return json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _run_numbers(run: Run, axes: Sequence[Axis]) -> dict[str, Any]:
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


def _is_ours(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MADE_BY.encode() in file.read(400)
