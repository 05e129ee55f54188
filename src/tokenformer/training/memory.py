"""Whether a ladder fits into this machine, by the cost model, before anything of it is built.

Enters: a recipe, its stages and the number of processes. Leaves: bytes, or a one-line error.
"""

import os

import torch

from ..memory import check_fits, machine_memory
from .ladder import Ladder, Stage
from .recipe import Recipe
from .settings import ADAMW


def memory_needed(recipe: Recipe, stage: Stage, processes: int) -> float:
    """Bytes that a training step of one process needs at least: weights, gradients, Adam's moments and activations."""
    settings = recipe.training
    # What other optimizers keep is not known; `at least` holds if nothing is counted.
    optimizer = settings.optimizer if settings.given_arguments().get("optim", ADAMW[0]) in ADAMW else "sgd"
    batch = recipe.batch_per_process(processes)
    memory = recipe.data.memory(stage.config, batch, optimizer, settings.gradient_checkpointing)
    average = memory.weights if settings.ema else 0
    sharded = memory.weights + average + memory.gradients + memory.optimizer
    shared_by = processes if settings.parallel == "fsdp" else 1
    part_kept = 0.5 if settings.bf16 or settings.fp16 else 1.0
    # Trainer holds the samples of all micro-batches of a step at once; of a sample at least eight bytes a unit.
    samples = settings.gradient_accumulation_steps * batch * recipe.data.units_per_sample * 8
    return sharded / shared_by + memory.activations * part_kept + memory.logits + samples


def memory_here() -> int | None:
    """Bytes for each process: those of a GPU, or else an equal part of the machine's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    whole = machine_memory()
    return None if whole is None else whole // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_memory(recipe: Recipe, ladder: Ladder, processes: int) -> None:
    """Refuse a ladder with a stage that cannot be trained here."""
    times = recipe.training.gradient_accumulation_steps
    accumulated = f", {times:,} times a step" if times > 1 else ""
    for stage in ladder.stages:
        check_fits(
            f"stage {stage.number}, of {stage.parameters:,} parameters, with {recipe.batch_per_process(processes):,} "
            f"{recipe.data.samples_name} per process{accumulated},",
            memory_needed(recipe, stage, processes),
            memory_here(),
            "use a smaller model or batch, training.gradient_checkpointing=true, or training.parallel=fsdp over "
            "several processes",
        )
