"""What growth in depth saves: against from scratch, against growth by tokens, against the small model trained on.

    make experiment NAME=depth

To 4 blocks of 64 tokens at width 128: 2 blocks for 1200 steps, then 4 for 500, the last 200 of which decay; or 32
tokens for 1200 steps, then 64. Every way has peers of equal FLOPs: the final size from scratch, and the small one
trained on. One rate for all, 2e-3, the best of both sizes from scratch (progressive_scaling).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.figures import OURS, THEIRS, colour, draw, legend
from lab.results import curve, final, finished, flops, losses, rise_at_growth, write_results
from lab.sizes import SEEDS, token_former
from lab.spec import Growth, Run
from lab.tables import change, markdown, with_spread

HERE = Path(__file__).parent
RATE, BEFORE, AFTER, DECAY = 2e-3, 1200, 500, 200
FINAL = token_former(64)
SHALLOW, NARROW = replace(FINAL, layers=2), token_former(32)
DEEPER = {"factor": 1, "depth": 4}


def grown(model: Any, **growth: Any) -> Run:
    """One growth step after BEFORE steps."""
    steps = BEFORE + AFTER
    return Run(model, RATE, steps, growths=(Growth(BEFORE, **growth),), decay=DECAY / steps)


WAYS = {
    "2 → 4 blocks, copies after each": grown(SHALLOW, **DEEPER),
    "2 → 4 blocks, copies on top": grown(SHALLOW, **DEEPER, new_blocks_at="top"),
    "2 → 4 blocks, fresh after each": grown(SHALLOW, **DEEPER, new_blocks="fresh"),
    "2 → 4 blocks, copies warmed up": grown(SHALLOW, **DEEPER, warm_new=50),
    "32 → 64 tokens, rotate": grown(NARROW, method="rotate"),
}
SEEDED = ("2 → 4 blocks, copies after each", "32 → 64 tokens, rotate")


def peers(run: Run) -> dict[str, Run]:
    """Runs of the same FLOPs without growth."""
    return {
        "from scratch": ungrown(FINAL, flops(run), run.seed),
        "small, trained on": ungrown(run.model, flops(run), run.seed),
    }


def ungrown(model: Any, budget: float, seed: int) -> Run:
    """Training with that many FLOPs; runs of other budgets share its steps before the decay."""
    steps = round(budget / flops(Run(model, RATE, 1)))
    # The other budgets' decays start here.
    starts = {round(flops(run) / flops(Run(model, RATE, 1))) - DECAY for run in WAYS.values()}
    marks = tuple(sorted(start for start in starts if start < steps - DECAY))
    return Run(model, RATE, steps, seed, decay=DECAY / steps, marks=marks)


def with_seeds(name: str) -> list[Run]:
    """A way with every seed that it is tried with."""
    return [replace(WAYS[name], seed=seed) for seed in (SEEDS if name in SEEDED else SEEDS[:1])]


def plan() -> list[Run]:
    """All ways with the first seed, then the others."""
    first = [run for name in WAYS for run in (WAYS[name], *peers(WAYS[name]).values())]
    return [*first, *(run for name in SEEDED for one in with_seeds(name)[1:] for run in (one, *peers(one).values()))]


def report() -> None:
    """Losses at equal FLOPs, and the curves of the first seed."""
    findings: dict[str, Any] = {}
    for name in WAYS:
        runs = finished(with_seeds(name))
        if runs:
            found = {"grown": losses(runs), "rise": max((rise_at_growth(run) for run in runs), key=abs)}
            for peer in ("from scratch", "small, trained on"):
                ended = finished([peers(run)[peer] for run in runs])
                found[peer] = losses(ended) if ended else None
            of_final = flops(runs[0]) / flops(Run(FINAL, RATE, 1))
            findings[name] = {**found, "flops": flops(runs[0]), "steps_of_the_final_size": of_final}
    write_results(HERE, findings, plan())
    draw(HERE / "depth.png", [_curves])


def _curves(axes: Any) -> None:
    way = WAYS["2 → 4 blocks, copies after each"]
    for label, hue, run in (
        ("2 → 4 blocks", OURS, way),
        ("4 blocks from scratch", colour(2), peers(way)["from scratch"]),
        ("2 blocks, trained on", THEIRS, peers(way)["small, trained on"]),
    ):
        if final(run) is not None:
            axes.plot(*curve(run), color=hue, label=label)
    axes.set(xlabel="training FLOPs", ylabel="validation loss, nats a byte", ylim=(None, 2.4))
    legend(axes)


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Every way beside its peers."""

    def loss(found: dict[str, Any], key: str) -> str:
        return with_spread(found[key]["validation"]) if found.get(key) else "-"

    rows = [
        [
            name,
            change(found["rise"]),
            f"{found['steps_of_the_final_size']:.0f}",
            loss(found, "grown"),
            loss(found, "from scratch"),
            loss(found, "small, trained on"),
        ]
        for name, found in findings.items()
    ]
    header = [
        "growth",
        "rise at growth",
        "FLOPs, in steps of the final size",
        "grown",
        "from scratch",
        "small, trained on",
    ]
    return {"ways": markdown(header, rows)}
