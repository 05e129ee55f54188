"""Checkpoints that appear whole or not at all, are verified when they are read, and of which a good one always stays.

A checkpoint is an ordinary model folder with the state of training beside the weights, written by `io.new_folder`: a
process that dies while writing leaves a hidden partial folder, which the next one removes. `grow_checkpoint` makes the
first checkpoint of a stage from the last one of the stage before.
"""

import re
import shutil
from pathlib import Path

from ..data.base import STREAM_FILE
from ..errors import BadFileError
from ..growth import Growth, apply_growth, grow_optimizer
from ..io import check_folder, new_folder
from ..models.loading import read_model
from ..models.side_files import copy_beside_weights
from . import optimizer_state
from .ema import grow_average

KEEP = "KEEP"  # a file by this name in a checkpoint says that it is never pruned
# What says where training is: the step, from which data position and learning rate follow, and random numbers.
PLACE = ("trainer_state.json", "scaler.pt", STREAM_FILE, "rng_state*.pth")


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.rpartition("-")[2])


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    found = [p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name) and p.is_dir()]
    return sorted(found, key=checkpoint_step)


def last_good(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is as it was written, and what is wrong with the newer ones."""
    problems: list[str] = []
    for checkpoint in reversed(checkpoints(folder)):
        try:
            check_folder(checkpoint)
            return checkpoint, problems
        except BadFileError as error:
            problems.append(str(error))
    return None, problems


def mark_kept(partial: Path) -> None:
    """Have a checkpoint that is being written stay for good: the one from just before the decay."""
    (partial / KEEP).write_text("The learning rate has not decayed yet: a ladder can be climbed on from here.\n")


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and those marked KEEP. For when the newest was just sealed."""
    for checkpoint in checkpoints(folder)[: -max(1, keep)]:
        if not (checkpoint / KEEP).exists():
            shutil.rmtree(checkpoint, ignore_errors=True)


def grow_checkpoint(source: Path, target: Path, growth: Growth, adam: str, *, kept: bool) -> None:
    """Grow the model in `source` by `growth` into `target`, at the same training step, whole or not at all.

    Weights, their average and the place in training are carried over; Adam's moments are carried or start afresh
    (reset). One process does it, with the full tensors, whatever trained them.
    kept: whether the checkpoint is never to be pruned, because the learning rate decays from there on.
    """
    model = read_model(source)
    state = optimizer_state.read(source) if adam == "carry" else {}
    apply_growth(model, growth, inplace=True)
    with new_folder(target) as folder:
        model.save_pretrained(folder)
        if state:
            grown = grow_optimizer({"state": state}, model, model, growth=growth)
            optimizer_state.write(folder, grown["state"])
        grow_average(source, folder, growth)
        copy_beside_weights(source, folder)
        for pattern in PLACE:
            for path in source.glob(pattern):
                shutil.copy2(path, folder)
        if kept:
            mark_kept(folder)
