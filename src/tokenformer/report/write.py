"""The report of one or several runs.

Enters: folders of runs. Leaves: report.html, loss-vs-compute.png and loss-vs-tokens.png (loss-vs-images.png for images)
in one folder, where they replace an earlier report, each in one step.

    tokenformer report RUN… --out FOLDER
"""

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import BadRequestError
from .curves import both_axes
from .figures import draw_losses
from .page import page
from .read import Run

# Stands near the beginning of each of the files, and tells a report of ours from somebody else's file.
MADE_BY = "tokenformer report"


def write_report(runs: Sequence[Run], folder: str | os.PathLike, log: bool = False) -> list[Path]:
    """Write the report into a folder, with logarithmic axes of compute and of what was seen if `log`."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise BadRequestError(f"{folder} is not a folder; give another --out")
    targets = [folder / name for name in ("report.html", "loss-vs-compute.png", f"loss-vs-{runs[0].unit}.png")]
    for target in targets:
        if os.path.lexists(target) and not _is_ours(target):
            raise BadRequestError(f"{target} is not from this command and would be overwritten; give another --out")
    axes = both_axes(runs)
    contents = [
        page(runs, axes, log, MADE_BY).encode(),
        *(draw_losses(runs, axes, which, log, MADE_BY) for which in range(2)),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    partials = [target.with_name(f".{target.name}.partial-{os.getpid()}") for target in targets]
    try:
        for partial, content in zip(partials, contents, strict=True):
            partial.write_bytes(content)
        for partial, target in zip(partials, targets, strict=True):
            os.replace(partial, target)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)
    return targets


def _is_ours(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MADE_BY.encode() in file.read(400)
