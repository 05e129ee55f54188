"""One linear layer of a small Transformer replaced by Pattention: query, key, value, output, or the FFN; and all.

    make experiment NAME=one_layer

A GPT-NeoX of 0.3M parameters. Each Pattention has as many parameters as the linear had; one stands for the whole FFN,
as in the paper. The Transformer, and the model with all replaced, try three rates each; one replaced layer takes the
Transformer's. Three seeds.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.figures import colour, draw
from lab.results import best, finished, losses, write_results
from lab.sizes import PROBE, RATES, SEEDS, at_rates, models
from lab.spec import NeoX, Run
from lab.tables import markdown, with_spread

HERE = Path(__file__).parent
_, TRANSFORMER = models(32)
PARTS = ("query", "key", "value", "dense", "mlp")


def sweep(parts: tuple[str, ...]) -> list[Run]:
    """Every rate, with the first seed."""
    return at_rates(lambda rate: Run(replace(TRANSFORMER, replaced=parts), rate, PROBE), RATES[NeoX])


def variants() -> dict[str, list[Run]]:
    """For every variant its runs with all seeds, as far as the rates are known."""
    plain, everything = best(sweep(())), best(sweep(PARTS))
    chosen = {"none": plain, "all": everything}
    if plain is not None:
        chosen |= {part: replace(plain, model=replace(TRANSFORMER, replaced=(part,))) for part in PARTS}
    return {name: [replace(run, seed=seed) for seed in SEEDS] for name, run in chosen.items() if run is not None}


def plan() -> list[Run]:
    """The sweeps, then the seeds."""
    return [*sweep(()), *sweep(PARTS), *(run for runs in variants().values() for run in runs)]


def report() -> None:
    """Losses by what is replaced."""
    findings: dict[str, Any] = {}
    for name, runs in variants().items():
        if finished(runs):
            findings[name] = losses(finished(runs))
    write_results(HERE, findings, plan())
    draw(HERE / "losses.png", [_losses(findings)])


def _losses(findings: dict[str, Any]) -> Any:
    def panel(axes: Any) -> None:
        names = [name for name in ("none", *PARTS, "all") if name in findings]
        for i, name in enumerate(names):
            values = findings[name]["validation"]["values"]
            axes.plot([i] * len(values), values, "o", color=colour(0), alpha=0.5)
            axes.plot([i - 0.2, i + 0.2], [findings[name]["validation"]["mean"]] * 2, color=colour(1))
        axes.set(xticks=range(len(names)), ylabel="validation loss, nats a byte")
        axes.set_xticklabels(names)

    return panel


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Losses by what is replaced."""
    rows = [
        [name, f"{found['lr']:g}", with_spread(found["validation"]), with_spread(found["test"])]
        for name, found in findings.items()
    ]
    return {"parts": markdown(["replaced", "rate", "validation", "test"], rows)}
