"""What a recipe would do and cost, without doing it: parameters, steps, tokens, compute and memory, stage by stage.

The data is not read, unless a stage is so many epochs of it; sources that are not there yet are named.
"""

import os
from collections.abc import Iterator

from ..data.sources import not_there
from .ladder import build_ladder
from .recipe import Recipe
from .setup import first_config, local_batch, run_folder, samples_per_step


def describe(recipe: Recipe) -> Iterator[tuple[str, dict[str, str]]]:
    """Titles and rows to print: one for each stage, and one for the whole run."""
    task, processes = recipe.task, int(os.environ.get("WORLD_SIZE", "1"))
    batch = local_batch(recipe, processes)
    task.check(recipe.training, batch)
    data = task.foresee(recipe.growth.in_epochs)
    samples = len(data.train) if recipe.growth.in_epochs else None
    ladder = build_ladder(recipe, first_config(recipe, data), samples_per_step(recipe, processes), samples)
    unit, per_step = task.unit, ladder.units_per_step
    ways = recipe.training
    shared_by = processes if ways["parallel"] == "fsdp" else 1
    part_kept = 0.5 if ways.get("bf16") or ways.get("fp16") else 1.0
    for stage in ladder.stages:
        memory = task.memory(stage.config, batch, bool(ways.get("gradient_checkpointing")))
        average, and_average = (memory.weights, " and average") if ways["ema"] else (0, "")
        cut_up = memory.weights + average + memory.gradients + memory.optimizer
        needed = cut_up / shared_by + memory.activations * part_kept + memory.logits
        counted = f"(weights{and_average}, gradients, Adam, activations)"
        forward, training = task.flops(stage.config)
        yield (
            f"stage {stage.number} of {len(ladder.stages)}",
            {
                "growth": stage.growth.method if stage.growth else "-",
                "parameters": f"{stage.parameters:,}",
                "tokens a layer": ", ".join(f"{role} {n:,}" for role, n in stage.config.num_tokens.items()),
                f"FLOPs {task.one_unit}": f"{forward:.3g} forward, {training:.3g} training",
                "steps": f"{stage.steps:,} ({stage.start:,} to {stage.end:,})",
                "learning rate": f"{stage.rate * recipe.training['learning_rate']:g}",
                unit: f"{stage.steps * per_step:,}",
                "compute": f"{stage.steps * per_step * training:.3g} FLOPs",
                "memory": f"about {needed / 2**30:.2f} GiB a process {counted}",
            },
        )
    end, missing = ladder.stages[-1].end, not_there(task.sources)
    yield (
        "the run",
        {
            "folder": str(run_folder(recipe)),
            **({"not there yet": ", ".join(missing)} if missing else {}),
            **task.assumed(ladder.stages[0].config, data),
            "schedule": ladder.schedule + (f", decay from step {ladder.decay_start:,}" if ladder.decay_start else ""),
            f"{unit} a step": f"{per_step:,} ({batch} {task.samples} a process, {processes} processes)",
            "steps": f"{end:,}",
            unit: f"{end * per_step:,}",
            "compute": f"{ladder.flops(end):.3g} FLOPs",
        },
    )
