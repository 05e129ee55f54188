"""What a recipe would do and cost, without doing it: parameters, steps, tokens, compute and memory, stage by stage.

The data is not read, unless a stage is given in epochs; sources that are not there yet are named.
"""

import os
from collections.abc import Iterator

from ..data.sources import missing_sources
from ..memory import GIB
from .ladder import Ladder, Stage, build_ladder
from .memory import memory_here, memory_needed
from .nested import mean_flops
from .recipe import Recipe
from .trainer import check_reporters


def describe(recipe: Recipe) -> Iterator[tuple[str, dict[str, str]]]:
    """Titles and rows to print: one for each stage, and one for the whole run."""
    data, settings, processes = recipe.data, recipe.training, int(os.environ.get("WORLD_SIZE", "1"))
    recipe.check_data(processes)
    check_reporters(settings.report_to)
    data.inspect(count_samples=recipe.growth.in_epochs)
    ladder = build_ladder(recipe, processes)
    batch, per_step = recipe.batch_per_process(processes), ladder.units_per_step
    counted = f"weights{' and average' if settings.ema else ''}, gradients, Adam's moments, activations"
    here = memory_here()
    for stage in ladder.stages:
        needed = memory_needed(recipe, stage, processes)
        too_much = f": more than the {here / GIB:.2f} GiB here" if here is not None and needed > here else ""
        forward, training = mean_flops(recipe, stage.config, processes)
        yield (
            f"stage {stage.number} of {len(ladder.stages)}",
            {
                **({"growth": stage.growth.label} if stage.growth else {}),
                **({"nested": ", ".join(f"{share:g}" for share in settings.nested)} if settings.nested else {}),
                "parameters": f"{stage.parameters:,}",
                "blocks": f"{stage.config.num_hidden_layers:,}",
                "tokens per layer": ", ".join(f"{role} {n:,}" for role, n in stage.config.num_tokens.items()),
                f"FLOPs {data.per_unit}": f"{forward:.3g} forward, {training:.3g} training",
                "steps": f"{stage.steps:,} ({stage.start:,} to {stage.end:,})",
                "learning rate": _rates(recipe, ladder, stage),
                f"{data.unit} in this stage": f"{stage.steps * per_step:,}",
                "compute": f"{stage.steps * per_step * training:.3g} FLOPs",
                "memory": f"about {needed / GIB:.2f} GiB per process{too_much}",
            },
        )
    end, missing = ladder.stages[-1].end, missing_sources(data.sources)
    yield (
        "the run",
        {
            "folder": str(recipe.folder),
            **({"missing sources": ", ".join(missing)} if missing else {}),
            **({"warning": ladder.warning} if ladder.warning else {}),
            **data.assumptions(ladder.stages[0].config),
            "schedule": ladder.schedule + (f", decay from step {ladder.decay_start:,}" if ladder.decay_start else ""),
            "memory includes": counted,
            f"{data.unit} per step": f"{per_step:,} ({batch} {data.samples_name} per process, {_count(processes)})",
            "steps": f"{end:,}",
            f"{data.unit} in total": f"{end * per_step:,}",
            "compute": f"{ladder.flops(end):.3g} FLOPs",
        },
    )


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes:,} processes"


def _rates(recipe: Recipe, ladder: Ladder, stage: Stage) -> str:
    """The learning rate of a stage and, where they follow the number of tokens, those of the value tokens by role."""
    rate = stage.rate_factor * recipe.training.learning_rate
    shares = {role: ladder.rate_base[role] / n for role, n in stage.config.num_tokens.items()}
    if recipe.training.rates == "equal" or set(shares.values()) == {1.0}:
        return f"{rate:g}"
    if len(set(shares.values())) == 1:
        return f"{rate:g}; value tokens {rate * shares['ffn']:g}"
    return f"{rate:g}; value tokens {', '.join(f'{role} {rate * share:g}' for role, share in shares.items())}"
