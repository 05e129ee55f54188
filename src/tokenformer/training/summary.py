"""A run's stages, read from the metrics that it wrote: as a table for the terminal, and as facts for a model's card.

Enters: a run's folder. Leaves: for every stage its parameters, the tokens or images seen, the validation loss before
and after growth and at its end, and the accuracy if it classifies images; of the weights, and of their average if there
is one.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data.sources import BUILT_IN, HUB_PREFIX
from ..models.card import CardFacts, StageFacts, derived_facts, public_name
from .callbacks import read_entry
from .recipe import Recipe

# What a stage may have ended with, beside the loss of its weights.
EXTRA_COLUMNS = {
    "validation_accuracy": "accuracy",
    "ema_validation_loss": "loss,\naveraged",
    "ema_validation_accuracy": "accuracy,\naveraged",
}


def has_metrics(folder: Path) -> bool:
    """Whether the file that all of this is read from is still there."""
    return (folder / "metrics.jsonl").exists()


def stage_table(folder: Path) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of a table of the stages that have ended."""
    growths, ends, unit = _read_stages(folder)
    more = [name for name in EXTRA_COLUMNS if any(name in end for end in ends)]
    losses = ["loss before\ngrowth", "loss after\ngrowth", "loss at\nthe end"]
    columns = ["stage", "parameters", f"{unit} so far", "growth", *losses, *(EXTRA_COLUMNS[name] for name in more)]
    rows = []
    for end in ends:
        growth = growths.get(end["stage"], {})
        rows.append(
            [
                str(end["stage"]),
                f"{end['parameters']:,}",
                f"{end[unit]:,}",
                growth.get("method", "-"),
                _number(growth.get("validation_loss_before")),
                _number(growth.get("validation_loss_after")),
                _number(end.get("validation_loss")),
                *(_number(end.get(name)) for name in more),
            ]
        )
    return columns, rows


def card_facts(folder: Path, recipe: Recipe) -> CardFacts:
    """What the card of the newest stage's model says of the run. A model trained on from another has its data too."""
    growths, ends, unit = _read_stages(folder)
    checkpoint = recipe.model.get("checkpoint")
    base = derived_facts(checkpoint, checkpoint) if checkpoint else CardFacts()
    averaged = "ema_" if ends[-1]["weights"] == "averaged" else ""
    stages = []
    for end in ends:
        growth = growths.get(end["stage"], {})
        stages.append(
            StageFacts(
                parameters=end["parameters"],
                steps=end["step"],
                seen=end[unit],
                method=growth.get("method"),
                loss_before_growth=growth.get(f"{averaged}validation_loss_before"),
                loss_after_growth=growth.get(f"{averaged}validation_loss_after"),
                loss=end.get(f"{averaged}validation_loss"),
                accuracy=end.get(f"{averaged}validation_accuracy"),
            )
        )
    sources = [f"{name} (built in)" if name in BUILT_IN else public_name(name) for name in recipe.data.sources]
    tokenizer = getattr(recipe.data.settings, "tokenizer", None)
    return replace(
        base,
        license=recipe.training.license or base.license,
        datasets=tuple(dict.fromkeys([*base.datasets, *(name.removeprefix(HUB_PREFIX) for name in sources)])),
        tokenizer=None if tokenizer is None else public_name(tokenizer),
        recipe=recipe.name,
        unit=unit,
        stages=tuple(stages),
    )


def _read_stages(folder: Path) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]], str]:
    """The lines of metrics.jsonl about each stage's growth and end, and the unit that training is counted in."""
    path = folder / "metrics.jsonl"
    text = path.read_text(errors="replace") if path.exists() else ""  # a run that is done does without
    lines = [entry for line in text.splitlines() if (entry := read_entry(line)) is not None]
    growths = {line["stage"]: line for line in lines if line["kind"] == "growth"}
    ends = [line for line in lines if line["kind"] == "stage_end"]
    return growths, ends, "images" if any("images" in end for end in ends) else "tokens"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}"
