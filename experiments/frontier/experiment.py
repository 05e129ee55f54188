"""Where is the frontier: the lowest loss that any size from scratch reaches with a budget? And is a ladder on it?

    make experiment NAME=frontier

Every size has one trunk at a constant rate, from which a branch decays for every budget, over a fifth of its steps: a
run from scratch of exactly as many FLOPs, for little more than the longest costs. Rates follow sizes, and are tuned on
the smallest only. A scaling law is fitted to the smaller budgets; it says when a ladder that one may stop anywhere
should grow, and what ladders and longer runs should reach.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.figures import OURS, colour, draw, legend, plain_ticks
from lab.models import config_of
from lab.results import final, flops, growth_steps, write_results
from lab.sizes import SIZES, rate_of, to_the_end, token_former
from lab.spec import Growth, Run, TokenFormer
from lab.tables import growth_table, markdown, number

from tokenformer import cost
from tokenformer.planning import FinishedRun, ScalingLaw, Size, anytime_climb, climbed, fit
from tokenformer.planning.plan import TRANSFER

HERE = Path(__file__).parent
BASE = (("hidden_size", 128), ("qkv", SIZES[0]), ("out", SIZES[0]), ("ffn", 4 * SIZES[0]))
BYTES = 8 * 256  # a step
SMALLEST = "32 tokens"
SHAPES: dict[str, TokenFormer] = {f"{tokens} tokens": token_former(tokens) for tokens in SIZES}
SHAPES["2 blocks of 64 tokens"] = replace(token_former(64), layers=2)
# FLOPs: those of 500 steps of the smallest size, and doublings up to 32 times that.
BUDGETS = tuple(flops(Run(SHAPES[SMALLEST], 0.0, 500)) * 2**k for k in range(6))
FITTED = BUDGETS[:4]
SHORTEST = 400  # steps from scratch; a quarter of them is warm-up
WARM_NEW = 50  # steps over which the rate of new tokens and blocks rises, as in a recipe
LADDERS = {
    "tokens": ("32 tokens", "64 tokens", "128 tokens", "256 tokens"),
    "depth and tokens": ("2 blocks of 64 tokens", "64 tokens", "128 tokens", "256 tokens"),
}


def scratch(name: str, lr: float, budget: float, seed: int = 0) -> Run:
    """A branch of a size's trunk."""
    a_step = flops(Run(SHAPES[name], lr, 1))
    runs = [Run(SHAPES[name], lr, round(spent / a_step), seed, base=BASE) for spent in BUDGETS if spent <= budget]
    return replace(runs[-1], marks=tuple(run.decay_start for run in runs[:-1] if run.steps >= SHORTEST))


def from_scratch(lr: float, budgets: tuple[float, ...] = BUDGETS) -> dict[tuple[str, float], Run]:
    """Every size with every budget, the small ones first."""
    runs = {(name, budget): scratch(name, lr, budget) for budget in budgets for name in SHAPES}
    return {key: run for key, run in runs.items() if run.steps >= SHORTEST}


@cache
def size_of(name: str) -> Size:
    """What the law and the planner know of a model."""
    config = config_of(SHAPES[name])
    return Size(name, cost.parameters(config).total, flops(Run(SHAPES[name], 0.0, 1)) / BYTES)


def law(lr: float) -> ScalingLaw | None:
    """Fitted to the smaller budgets, once all of their runs are there."""
    runs = from_scratch(lr, FITTED)
    if any(final(run) is None for run in runs.values()):
        return None
    return _fitted(tuple((name, run.steps, final(run) or 0.0) for (name, _), run in runs.items()))


@cache
def _fitted(measured: tuple[tuple[str, int, float], ...]) -> ScalingLaw:
    return fit([FinishedRun(size_of(name).parameters, steps * BYTES, loss) for name, steps, loss in measured])


@dataclass(frozen=True)
class Ladder:
    """One trunk that grows, and a branch that decays for every budget."""

    sizes: tuple[str, ...]
    growths: tuple[Growth, ...]
    lr: float

    def branch(self, budget: float, seed: int = 0) -> Run:
        """The run that ends when the budget is spent. It grows as often as it can before its rate decays.

        If the trunk grows within the last fifth of the steps, the rate decays from there on.
        """
        for taken in range(len(self.growths), -1, -1):
            run = self._run(self.growths[:taken], budget, seed)
            if not taken or run.growths[-1].step <= run.decay_start:
                break
        leaves = self.growths[taken].step if taken < len(self.growths) else run.decay_start
        return run if run.decay_start <= leaves else replace(run, decay=(run.steps - leaves) / run.steps)

    def _run(self, growths: tuple[Growth, ...], budget: float, seed: int) -> Run:
        last = growths[-1].step if growths else 0
        run = Run(SHAPES[self.sizes[0]], self.lr, last, seed, growths, base=BASE)
        a_step = flops(replace(run, steps=last + 1)) - flops(run)
        return replace(run, steps=last + round((budget - flops(run)) / a_step))

    def stages(self, run: Run) -> list[tuple[Size, float]]:
        """What a branch sees at each size."""
        cuts = [0, *(growth.step for growth in run.growths), run.steps]
        return [(size_of(size), (b - a) * BYTES) for size, (a, b) in zip(self.sizes, pairwise(cuts), strict=False)]

    def branches(self, seed: int = 0) -> list[Run]:
        """One for every budget; each keeps the states from which the shorter ones' rates decay."""
        runs = [self.branch(budget, seed) for budget in BUDGETS]
        starts = [run.decay_start for run in runs]
        return [replace(run, marks=tuple(s for s in starts if s < run.decay_start)) for run in runs]


def ladder(name: str, lr: float) -> Ladder | None:
    """With growth steps where the law says; None as long as the law is not known."""
    fitted = law(lr)
    if fitted is None:
        return None
    climb = anytime_climb(fitted, [size_of(size) for size in LADDERS[name]], BUDGETS[-1], TRANSFER)
    sizes = tuple(rung.size.name for rung in climb.rungs)
    growths, step = [], 0
    for rung, (small, large) in zip(climb.rungs, pairwise(sizes), strict=False):
        step += round(rung.seen / BYTES)
        growths.append(_step_up(step, SHAPES[small], SHAPES[large]))
    return Ladder(sizes, tuple(growths), lr)


def _step_up(step: int, small: TokenFormer, large: TokenFormer) -> Growth:
    depth = large.layers if large.layers != small.layers else 0
    return Growth(step, large.tokens / small.tokens, method="rotate", depth=depth, warm_new=WARM_NEW)


def ladders(lr: float) -> dict[str, Ladder]:
    """Those that are known."""
    return {name: one for name in LADDERS if (one := ladder(name, lr)) is not None}


def plan() -> list[Run]:
    """Sizes from scratch with the budgets of the law, ladders, then larger budgets."""
    lr = rate_of(SHAPES[SMALLEST])
    if lr is None:
        return to_the_end(SHAPES[SMALLEST])
    runs = from_scratch(lr)
    fitted = [run for (_, budget), run in runs.items() if budget in FITTED]
    grown = [run for one in ladders(lr).values() for run in one.branches()]
    return [*fitted, *grown, *(run for (_, budget), run in runs.items() if budget not in FITTED)]


def report() -> None:
    """Every size and every ladder at every budget, what the law said, and how smooth growth was."""
    findings: dict[str, Any] = {}
    lr = rate_of(SHAPES[SMALLEST])
    fitted = None if lr is None else law(lr)
    if lr is not None and fitted is not None:
        a, b, e, alpha, beta = fitted.coefficients
        findings["law"] = {"A": math.exp(a), "B": math.exp(b), "E": math.exp(e), "alpha": alpha, "beta": beta}
        findings["scratch"] = [
            {
                **{"size": name, "budget": budget, "steps": run.steps, "loss": loss, "fitted": budget in FITTED},
                "predicted": float(fitted.loss(size_of(name).parameters, run.steps * BYTES)),
            }
            for (name, budget), run in from_scratch(lr).items()
            if (loss := final(run)) is not None
        ]
        findings["ladders"] = {
            name: {"sizes": one.sizes, "growths": growth_steps(one.branches()), "budgets": _reached(one, fitted)}
            for name, one in ladders(lr).items()
        }
        draw(HERE / "frontier.png", [lambda axes: _losses(axes, findings), lambda axes: _above(axes, findings)])
    write_results(HERE, findings, plan())


def _reached(one: Ladder, fitted: ScalingLaw) -> list[dict[str, Any]]:
    done = [(budget, run) for budget in BUDGETS if final(run := one.branch(budget)) is not None]
    return [
        {
            **{"budget": budget, "steps": run.steps, "size": one.sizes[len(run.growths)], "loss": final(run)},
            "predicted": climbed(fitted, one.stages(run), TRANSFER).loss,
            "if_nothing_were_lost": climbed(fitted, one.stages(run), 1.0).loss,
        }
        for budget, run in done
    ]


def lowest(findings: dict[str, Any]) -> dict[float, dict[str, Any]]:
    """The best size from scratch at every budget at which some were trained."""
    found: dict[float, dict[str, Any]] = {}
    for one in findings["scratch"]:
        if one["budget"] not in found or one["loss"] < found[one["budget"]]["loss"]:
            found[one["budget"]] = one
    return found


def _losses(axes: Any, findings: dict[str, Any]) -> None:
    for i, name in enumerate(SHAPES):
        _line(axes, (one for one in findings["scratch"] if one["size"] == name), "o-", colour(i + 2), name)
    for (name, one), style in zip(findings["ladders"].items(), ("s-", "s--"), strict=True):
        _line(axes, one["budgets"], style, OURS, f"grown by {name}")
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="validation loss, nats a byte")
    plain_ticks(axes.xaxis)
    legend(axes)


def _line(axes: Any, points: Iterable[dict[str, Any]], style: str, hue: str, name: str) -> None:
    ordered = sorted((one["budget"], one["loss"]) for one in points)
    if ordered:
        axes.plot(*zip(*ordered, strict=True), style, color=hue, label=name, ms=4, lw=1.2)


def _above(axes: Any, findings: dict[str, Any]) -> None:
    """The same, relative to the frontier."""
    best = {budget: one["loss"] for budget, one in lowest(findings).items()}

    def relative(points: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"budget": one["budget"], "loss": 100 * (one["loss"] / best[one["budget"]] - 1)}
            for one in points
            if one["budget"] in best
        ]

    for i, name in enumerate(SHAPES):
        of_size = [one for one in findings["scratch"] if one["size"] == name]
        _line(axes, relative(of_size), "o-", colour(i + 2), name)
    for (name, one), style in zip(findings["ladders"].items(), ("s-", "s--"), strict=True):
        _line(axes, relative(one["budgets"]), style, OURS, f"grown by {name}")
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="% above the best size from scratch", ylim=(-2, 15))
    plain_ticks(axes.xaxis)
    legend(axes)


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """The frontier with the ladders, every size, what was predicted, and growth steps."""
    if not findings:
        return {"budgets": "", "sizes": "", "predicted": "", "growths": ""}
    best = lowest(findings)
    scratch = {(one["size"], one["budget"]): one for one in findings["scratch"]}
    grown = {(name, at["budget"]): at for name, one in findings["ladders"].items() for at in one["budgets"]}

    def against(budget: float, one: dict[str, Any] | None) -> str:
        return f"{one['loss'] / best[budget]['loss'] - 1:+.1%}" if one and budget in best else "-"

    def both(budget: float, name: str) -> list[str]:
        one = grown.get((name, budget))
        return [f"{number(one['loss'])} ({one['size']})" if one else "-", against(budget, one)]

    budgets = [
        [
            f"{budget:.3g}",
            f"{number(one['loss'])} ({one['size']})",
            *(x for name in LADDERS for x in both(budget, name)),
        ]
        for budget, one in best.items()
    ]
    sizes = [[name, *(against(budget, scratch.get((name, budget))) for budget in best)] for name in SHAPES]
    tested = [("from scratch", one) for one in findings["scratch"] if not one["fitted"]]
    tested += [(f"grown by {name}", at) for name, one in findings["ladders"].items() for at in one["budgets"]]
    predicted = [
        [how, one["size"], f"{one['budget']:.3g}", number(one["loss"]), number(one["predicted"]),
         f"{one['predicted'] / one['loss'] - 1:+.1%}"]
        for how, one in tested
    ]  # fmt: skip
    growths = growth_table({name: one["growths"] for name, one in findings["ladders"].items()})
    heads = [head for name in LADDERS for head in (f"grown by {name}", "")]
    return {
        "budgets": markdown(["FLOPs", "best from scratch", *heads], budgets),
        "sizes": markdown(["from scratch", *(f"{budget:.3g}" for budget in best)], sizes),
        "predicted": markdown(["", "size", "FLOPs", "measured", "predicted", ""], predicted),
        "growths": growths,
    }
