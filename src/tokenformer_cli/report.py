"""report: the measurements of training runs as a page and as pictures."""

from pathlib import Path
from typing import Annotated

import typer

from .terminal import show_summary

commands = typer.Typer()


@commands.command("report", epilog="Example: tokenformer report runs/ladder runs/from-scratch --out comparison")
def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of training runs.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to write.", show_default="RUN/report; ./report for several runs"),
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="Logarithmic horizontal axes.")] = False,
) -> None:
    """Draw the losses of runs against compute, and tokens or images: one HTML page and two PNGs.

    The page needs no network, and has each run's stages, learning rate, gradient norm, speed, accuracy and recipe. A
    run may still be going. An earlier report is replaced.
    """
    from tokenformer.report import load_runs, write_report

    runs = load_runs(folders)
    target = out or (folders[0] / "report" if len(folders) == 1 else Path("report"))
    written = write_report(runs, target, log)
    rows = {run.label: f"{len(run.train):,} measurements, stages: {len(run.stages)}" for run in runs}
    unreadable = sum(run.unreadable for run in runs)
    if unreadable:
        rows["left out"] = f"lines that could not be read: {unreadable:,}"
    show_summary("Reported", {**rows, "written": ", ".join(str(path) for path in written)})
