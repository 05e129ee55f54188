"""Does `tokenformer plan` predict what ladders reach, and how much of training survives growth?

    make experiment NAME=planning        or, from what is kept: python experiments/run.py planning --kept

Trains nothing of its own: models from scratch and ladders are those of progressive_scaling. A law is fitted to the best
run from scratch of every size, at 600 and at 2000 steps, and the share of training that survives growth to the ladders.
"""

import itertools
import math
from pathlib import Path
from typing import Any

from lab.figures import OURS, colour, draw, legend
from lab.models import config_of
from lab.results import final, shape_at, write_results
from lab.sizes import SIZES, rate_of, scratch, sweep, to_the_end, token_former
from lab.spec import Run
from lab.tables import markdown, number
from progressive_scaling.experiment import LATER, METHODS, OTHERS, SEEDED, SMALLEST

from tokenformer import cost
from tokenformer.planning import (
    FinishedLadder,
    FinishedRun,
    ScalingLaw,
    Size,
    best_climb,
    climbed,
    fit,
    fitted_transfer,
)

HERE = Path(__file__).parent
BYTES = 8 * 256  # a step
BUDGETS = (1e13, 3e13, 1e14, 3e14, 1e15, 3e15, 1e16)  # FLOPs; the longest runs that were fitted took 6e13
# Ladders that keep one rate and all that was learnt; the others test recipes that lose some of it.
LADDERS = {
    "grown at 1600": METHODS["rotate"],
    "grown at 1600, decay of 400 steps": SEEDED["grown at 1600"],
    "grown at 1600 to 256 tokens, decay of 400 steps": OTHERS["rotate, decay over 400 steps instead of 300"],
    "grown at 2000": LATER,
    "grown at 2000, seeds": SEEDED["grown at 2000"],
    "grown at 800": OTHERS["rotate, grown early"],
    "8x at once": OTHERS["rotate, 8x at once"],
}
SEEDED_LADDERS = ("grown at 1600, decay of 400 steps", "grown at 2000, seeds")


def plan() -> list[Run]:
    """What the law and the ladders are made of."""
    lr = rate_of(SMALLEST)
    models = [token_former(tokens) for tokens in SIZES]
    runs = [run for model in models for run in (*sweep(model), *to_the_end(model))]
    return runs if lr is None else [*runs, *(run for _, run in ladders(lr))]


def ladders(lr: float) -> list[tuple[str, Run]]:
    """Every branch of every ladder once, with its seeds."""
    found: dict[Run, str] = {}
    for name, ladder in LADDERS.items():
        for seed in (0, 1, 2) if name in SEEDED_LADDERS else (0,):
            for run in ladder.runs(lr, seed):
                found.setdefault(run, name)
    return [(name, run) for run, name in found.items()]


def points() -> dict[str, FinishedRun]:
    """The lowest loss from scratch of every size at every length, with the first seed."""
    found = {}
    for tokens in SIZES:
        model = token_former(tokens)
        runs = {*sweep(model), *to_the_end(model)}
        for steps in sorted({run.steps for run in runs}):
            losses = [final(run) for run in runs if run.steps == steps]
            if None not in losses:
                name = f"{tokens} tokens, {steps} steps"
                found[name] = FinishedRun(size_of(scratch(model, 0.0), 0).parameters, steps * BYTES, min(losses))
    return found


def size_of(run: Run, step: int) -> Size:
    """The model that makes a step."""
    shape = shape_at(run, step)
    config = config_of(shape)
    flops = cost.training_flops_per_token(config, run.context)
    return Size(f"{shape.tokens} tokens", cost.parameters(config).total, flops)


def as_ladder(name: str, run: Run) -> FinishedLadder:
    """A run as `tokenformer plan` reads it."""
    cuts = [0, *(growth.step for growth in run.growths), run.steps]
    stages = [(size_of(run, a), (b - a) * BYTES) for a, b in itertools.pairwise(cuts)]
    return FinishedLadder(name, tuple(stages), final(run) or math.nan)


def report() -> None:
    """The fit, how well it predicts what it has not seen, and the ladders."""
    measured, lr, findings = points(), rate_of(SMALLEST), {}
    if len(measured) >= 6 and lr is not None:
        law = fit([*measured.values()])
        a, b, e = (math.exp(x) for x in law.coefficients[:3])
        findings["law"] = {"A": a, "B": b, "E": e, "alpha": law.coefficients[3], "beta": law.coefficients[4]}
        findings["points"] = {name: _point(law, name, measured) for name in measured}
        done = [(name, run) for name, run in ladders(lr) if final(run) is not None]
        finished = [as_ladder(name, run) for name, run in done]
        findings["transfer"] = fitted_transfer(law, finished)
        findings["ladders"] = [_ladder(law, i, finished, done[i][1].seed) for i in range(len(finished))]
        findings["budgets"] = {f"{budget:.0e}": _budget(law, budget, findings["transfer"]) for budget in BUDGETS}
        draw(HERE / "planning.png", [lambda axes: _scatter(axes, findings)])
    write_results(HERE, findings, plan())


def _point(law: ScalingLaw, name: str, measured: dict[str, FinishedRun]) -> dict[str, float]:
    run = measured[name]
    others = fit([other for key, other in measured.items() if key != name])
    return {
        "measured": run.loss,
        "fitted": float(law.loss(run.parameters, run.seen)),
        "left_out": float(others.loss(run.parameters, run.seen)),
    }


def _ladder(law: ScalingLaw, i: int, finished: list[FinishedLadder], seed: int) -> dict[str, Any]:
    """The prediction of one by what survives growth in the others."""
    ladder = finished[i]
    transfer = fitted_transfer(law, [other for other in finished if other is not ladder])
    predicted = climbed(law, ladder.stages, transfer)
    return {
        "name": ladder.label,
        "ends_at": ladder.stages[-1][0].name,
        "seed": seed,
        "measured": ladder.loss,
        "predicted": predicted.loss,
        "nothing_lost": climbed(law, ladder.stages, 1.0).loss,
    }


def _budget(law: ScalingLaw, budget: float, transfer: float) -> dict[str, Any]:
    """What the law says of a budget: the best size from scratch, two fixed sizes, and ladders, relative to the best."""
    sizes = [size_of(scratch(token_former(32 * 2**i), 0.0), 0) for i in range(7)]
    losses = {size.name: float(law.loss(size.parameters, budget / size.flops_per_unit)) for size in sizes}
    best = min(losses, key=lambda name: losses[name])
    climb = best_climb(law, sizes, budget, transfer)
    return {
        "best": best,
        "fixed": {name: losses[name] / losses[best] - 1 for name in (sizes[0].name, sizes[3].name)},
        "grown": climb.loss / losses[best] - 1,
        "sizes": [rung.size.name for rung in climb.rungs],
        "nothing_lost": best_climb(law, sizes, budget, 1.0).loss / losses[best] - 1,
    }


def _scatter(axes: Any, findings: dict[str, Any]) -> None:
    for hue, label, pairs in (
        (
            colour(2),
            "from scratch, left out of the fit",
            [(p["left_out"], p["measured"]) for p in findings["points"].values()],
        ),
        (OURS, "ladders", [(one["predicted"], one["measured"]) for one in findings["ladders"]]),
    ):
        axes.plot(*zip(*pairs, strict=True), "o", color=hue, label=label, ms=4)
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], color="grey", lw=0.8)
    axes.set(xlabel="predicted loss, nats a byte", ylabel="measured loss")
    legend(axes)


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Points, ladders, and how far off they are."""
    if not findings:
        return {"points": "", "ladders": "", "summary": "", "budgets": ""}
    rows = [
        [
            name,
            number(p["measured"]),
            number(p["fitted"]),
            number(p["left_out"]),
            f"{p['left_out'] / p['measured'] - 1:+.1%}",
        ]
        for name, p in findings["points"].items()
    ]
    grown = [
        [one["name"], one["ends_at"], str(one["seed"]), number(one["measured"]), number(one["predicted"]),
         f"{one['predicted'] / one['measured'] - 1:+.1%}"]
        for one in findings["ladders"]
    ]  # fmt: skip
    off = [one["predicted"] / one["measured"] - 1 for one in findings["ladders"]]
    ceiling = [one["nothing_lost"] / one["measured"] - 1 for one in findings["ladders"]]
    rms, rms_of_ceiling = (math.sqrt(sum(x * x for x in each) / len(each)) for each in (off, ceiling))
    law = findings["law"]
    budgets = [
        [budget, one["best"], *(f"{x:+.1%}" for x in one["fixed"].values()), " → ".join(one["sizes"]),
         f"{one['grown']:+.2%}", f"{one['nothing_lost']:+.2%}"]
        for budget, one in findings["budgets"].items()
    ]  # fmt: skip
    header = [
        "FLOPs",
        "best from scratch",
        "32 tokens",
        "256 tokens",
        "best ladder",
        "its loss",
        "if nothing were lost",
    ]
    return {
        "budgets": markdown(header, budgets),
        "points": markdown(["from scratch", "measured", "fitted", "predicted by the others", ""], rows),
        "ladders": markdown(["ladder", "ends at", "seed", "measured", "predicted", ""], grown),
        "summary": markdown(
            [
                "E",
                "A",
                "alpha",
                "B",
                "beta",
                "survives a doubling",
                "ladders: off by",
                "within 1 %",
                "off by, if nothing were lost",
            ],
            [
                [
                    f"{law['E']:.2f}",
                    f"{law['A']:.0f}",
                    f"{law['alpha']:.2f}",
                    f"{law['B']:.0f}",
                    f"{law['beta']:.2f}",
                    f"{findings['transfer']:.0%}",
                    f"{rms:.1%}",
                    f"{sum(abs(x) < 0.01 for x in off)} of {len(off)}",
                    f"{rms_of_ceiling:.1%}",
                ]
            ],
        ),
    }
