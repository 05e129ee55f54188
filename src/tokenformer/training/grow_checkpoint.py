"""Growth from checkpoint to checkpoint: weights, their average, Adam's moments, and the place in training.

Enters: the last checkpoint of a stage and a planned growth step. Leaves: the first checkpoint of the next stage, at the
same training step, whole or not at all. One process does it, with the full tensors, whatever trained them.
"""

import shutil
from pathlib import Path

from ..growth import Growth, apply_growth, grow_optimizer
from ..models.folder import copy_beside_weights
from ..models.loading import read_tokenformer
from . import optimizer_state
from .average import grow_average
from .checkpoint import mark_kept, new_checkpoint

# What says where training is: the step, from which data position and learning rate follow, and random numbers.
PLACE = ("trainer_state.json", "scaler.pt", "stream.pt", "rng_state*.pth")


def grow_checkpoint(source: Path, target: Path, growth: Growth, adam: str, *, kept: bool) -> None:
    """Grow the model in `source` by `growth` into `target`; Adam's moments are carried or start afresh (reset).

    kept: whether the checkpoint is never to be pruned, because the learning rate decays from there on.
    """
    model = read_tokenformer(source)
    state = optimizer_state.read(source) if adam == "carry" else {}
    apply_growth(model, growth, inplace=True)
    with new_checkpoint(target) as folder:
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
