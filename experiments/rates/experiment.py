"""Does the best rate stay where it is when a model has more tokens, or is wider?

    make experiment NAME=rates

From scratch, 600 steps, the first seed. Every size tries rates by factors of two, and goes on while the best is at an
end of them: once with one rate for all parameters (equal), once with rates that follow the size of a layer against the
smallest size at width 128 (scaled). The optimum is that of a parabola through the best rate and its two neighbours, in
the logarithm of the rate.
"""

import math
from pathlib import Path
from typing import Any

from lab.figures import colour, draw, legend, plain_ticks
from lab.results import best, final, write_results
from lab.sizes import PROBE, RATES, SIZES, at_rates, token_former
from lab.spec import Run, TokenFormer
from lab.tables import markdown, number

HERE = Path(__file__).parent
BASE = (("hidden_size", 128), ("qkv", SIZES[0]), ("out", SIZES[0]), ("ffn", 4 * SIZES[0]))
WAYS: dict[str, tuple[tuple[str, int], ...]] = {"scaled": BASE, "equal": ()}
SHAPES = {f"{tokens} tokens, width 128": token_former(tokens) for tokens in SIZES}
SHAPES |= {f"64 tokens, width {width}": token_former(64, width) for width in (64, 256)}


def sweep(model: TokenFormer, way: str) -> list[Run]:
    """Every rate."""
    return at_rates(lambda rate: Run(model, rate, PROBE, base=WAYS[way]), RATES[TokenFormer])


def plan() -> list[Run]:
    """All sizes, the smallest first, scaled rates before equal ones."""
    return [run for way in WAYS for model in SHAPES.values() for run in sweep(model, way)]


def optimum(losses: dict[float, float]) -> float:
    """The lowest point of a parabola through the lowest loss and its neighbours, in the logarithm of the rate."""
    rates = sorted(losses)
    i = min(range(1, len(rates) - 1), key=lambda j: losses[rates[j]])
    below, lowest, above = (losses[rate] for rate in rates[i - 1 : i + 2])
    shift = (below - above) / (2 * (below - 2 * lowest + above))
    return rates[i] * math.exp(shift * math.log(2))


def report() -> None:
    """Losses by size and rate, where the optimum is, and the curves."""
    findings: dict[str, Any] = {}
    for way in WAYS:
        for name, model in SHAPES.items():
            runs = sweep(model, way)
            if best(runs) is not None:
                found = {run.lr: final(run) or math.inf for run in runs}
                losses = {f"{rate:g}": loss for rate, loss in found.items()}
                findings.setdefault(name, {})[way] = {"losses": losses, "optimum": optimum(found)}
    write_results(HERE, findings, plan())
    draw(HERE / "rates.png", [_curves(way, findings) for way in WAYS])


def _curves(way: str, findings: dict[str, Any]) -> Any:
    def panel(axes: Any) -> None:
        for i, (name, ways) in enumerate(findings.items()):
            if way in ways:
                losses = {float(rate): loss for rate, loss in ways[way]["losses"].items()}
                axes.plot(list(losses), list(losses.values()), "o-", color=colour(i), label=name)
                axes.axvline(ways[way]["optimum"], color=colour(i), lw=0.8, ls=":")
        axes.set(xscale="log", xlabel="learning rate", ylabel="validation loss, nats a byte", title=f"{way} rates")
        plain_ticks(axes.xaxis, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))
        legend(axes)

    return panel


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """The optimum and the lowest loss of every size, both ways."""
    rows = [
        [
            name,
            *(
                cell
                for way in WAYS
                for cell in (
                    (f"{ways[way]['optimum']:.2g}", number(min(ways[way]["losses"].values())))
                    if way in ways
                    else ("-", "-")
                )
            ),
        ]
        for name, ways in findings.items()
    ]
    header = ["size", *(f"{what}, {way}" for way in WAYS for what in ("best rate", "lowest loss"))]
    return {"sizes": markdown(header, rows)}
