"""What a recipe would do and cost, without doing it: parameters, steps, tokens, compute and memory, stage by stage."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..cost import forward_flops_per_token, training_memory
from ..data import load_tokenizer
from .ladder import build_ladder
from .recipe import Recipe
from .setup import first_config, local_batch, run_folder, tokens_per_step


def describe(recipe: Recipe) -> Iterator[tuple[str, dict[str, str]]]:
    """Titles and rows to print: one for each stage, and one for the whole run. The data is not read."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    per_step, batch = tokens_per_step(recipe, processes), local_batch(recipe, processes)
    length = recipe.data.block_length
    ladder = build_ladder(recipe, first_config(recipe, vocabulary(recipe)), per_step)
    for stage in ladder.stages:
        memory = training_memory(
            stage.config,
            batch,
            length,
            gradient_checkpointing=bool(recipe.training.get("gradient_checkpointing")),
        )
        counts = ", ".join(f"{role} {n:,}" for role, n in stage.config.num_tokens.items())
        yield (
            f"stage {stage.number} of {len(ladder.stages)}",
            {
                "growth": stage.growth.method if stage.growth else "-",
                "parameters": f"{stage.parameters:,}",
                "tokens a layer": counts,
                "FLOPs a token": f"{forward_flops_per_token(stage.config, length):.3g} forward, "
                f"{stage.flops_per_token:.3g} training",
                "steps": f"{stage.steps:,} ({stage.start:,} to {stage.end:,})",
                "tokens": f"{stage.steps * per_step:,}",
                "compute": f"{stage.steps * per_step * stage.flops_per_token:.3g} FLOPs",
                "memory": f"about {memory.total / 2**30:.2f} GiB a process (weights, gradients, Adam, activations)",
            },
        )
    end = ladder.stages[-1].end
    yield (
        "the run",
        {
            "folder": str(run_folder(recipe)),
            "schedule": ladder.schedule + (f", decay from step {ladder.decay_start:,}" if ladder.decay_start else ""),
            "tokens a step": f"{per_step:,} ({batch} blocks of {length} a process, {processes} processes)",
            "steps": f"{end:,}",
            "tokens": f"{end * per_step:,}",
            "compute": f"{ladder.flops(end):.3g} FLOPs",
        },
    )


@dataclass
class _Vocabulary:
    vocab_size: int
    eos_token_id: int


def vocabulary(recipe: Recipe) -> _Vocabulary | None:
    """What the tokenizer is like, if it can be known without fetching anything."""
    name = recipe.data.tokenizer
    if name != "bytes" and not Path(name).exists():
        return None
    tokenizer = load_tokenizer(name, recipe.data.eos_token)
    return _Vocabulary(len(tokenizer), tokenizer.eos_token_id)
