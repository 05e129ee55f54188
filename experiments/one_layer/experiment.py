"""One linear layer of a small Transformer replaced by Pattention: query, key, value, output, or the FFN; and all.

    make experiment NAME=one_layer

A GPT-NeoX of 0.3M parameters. Each Pattention has as many parameters as the linear had; one stands for the whole FFN,
as in the paper. The Transformer, and the model with all replaced, try three rates each; one replaced layer takes the
Transformer's. Three seeds. New keys are N(0, 0.02), the paper's, or N(0, 1/√width), as all weights of the Transformer.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.figures import colour, draw, legend
from lab.results import best, finished, losses, write_results
from lab.sizes import PROBE, RATES, SEEDS, at_rates, models
from lab.spec import NeoX, Run
from lab.tables import markdown, with_spread

HERE = Path(__file__).parent
_, TRANSFORMER = models(32)
PARTS = ("query", "key", "value", "dense", "mlp")
WIDE = replace(TRANSFORMER, keys=TRANSFORMER.width**-0.5)
MODELS = {"none": TRANSFORMER} | {
    name + suffix: replace(model, replaced=parts)
    for model, suffix in ((TRANSFORMER, ""), (WIDE, ", wide keys"))
    for name, parts in [*((part, (part,)) for part in PARTS), ("all", PARTS)]
}
TRIED = ("none", "all", "all, wide keys")


def sweep(model: NeoX) -> list[Run]:
    """Every rate, with the first seed."""
    return at_rates(lambda rate: Run(model, rate, PROBE), RATES[NeoX])


def variants() -> dict[str, list[Run]]:
    """For every variant its runs with all seeds, as far as the rates are known."""
    rates = {name: best(sweep(MODELS[name])) for name in TRIED}
    chosen = {name: rates[name if name in TRIED else "none"] for name in MODELS}
    return {
        name: [replace(run, model=MODELS[name], seed=seed) for seed in SEEDS]
        for name, run in chosen.items()
        if run is not None
    }


def plan() -> list[Run]:
    """The sweeps, then the seeds."""
    rates = [run for name in TRIED for run in sweep(MODELS[name])]
    return rates + [run for runs in variants().values() for run in runs]


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
        names = ["none", *PARTS, "all"]
        for hue, suffix, label in ((0, "", "keys N(0, 0.02)"), (1, ", wide keys", "keys N(0, 1/√width)")):
            found = {
                i: findings[name + suffix]["validation"] for i, name in enumerate(names) if name + suffix in findings
            }
            places = [i + 0.2 * hue for i, spread in found.items() for _ in spread["values"]]
            values = [value for spread in found.values() for value in spread["values"]]
            axes.plot(places, values, "o", color=colour(hue), alpha=0.6, label=label)
        axes.set(xticks=range(len(names)), ylabel="validation loss, nats a byte")
        axes.set_xticklabels(names)
        legend(axes)

    return panel


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Losses by what is replaced."""
    rows = [
        [name, f"{found['lr']:g}", with_spread(found["validation"]), with_spread(found["test"])]
        for name, found in findings.items()
    ]
    return {"parts": markdown(["replaced", "rate", "validation", "test"], rows)}
