"""Where is the frontier: the lowest loss that any size from scratch reaches with a budget? And is a ladder on it?

    make experiment NAME=frontier

Every size has one trunk at a constant rate, from which a branch decays for every budget, over a fifth of its steps: a
run from scratch of exactly as many FLOPs, for little more than the longest costs. Rates follow sizes, and are tuned on
the smallest only. A scaling law is fitted to the smaller budgets; it says when the ladders grow, and what they and the
longer runs should reach.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from lab.models import config_of
from lab.results import final, flops
from lab.sizes import SIZES, rate_of, token_former
from lab.spec import Growth, Run, TokenFormer

from tokenformer import cost
from tokenformer.planning import FinishedRun, ScalingLaw, Size, best_climb, fit
from tokenformer.planning.plan import TRANSFER

BASE = (("hidden_size", 128), ("qkv", SIZES[0]), ("out", SIZES[0]), ("ffn", 4 * SIZES[0]))
BYTES = 8 * 256  # a step
SMALLEST = "32 tokens"
SHAPES: dict[str, TokenFormer] = {f"{tokens} tokens": token_former(tokens) for tokens in SIZES}
SHAPES["2 blocks of 64 tokens"] = replace(token_former(64), layers=2)
# FLOPs: those of 500 steps of the smallest size, and doublings up to 32 times that.
BUDGETS = tuple(flops(Run(SHAPES[SMALLEST], 0.0, 500)) * 2**k for k in range(6))
FITTED = BUDGETS[:4]
SHORTEST = 400  # steps from scratch; a quarter of them is warm-up
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
        """The run that ends when the budget is spent. It grows as often as it can before its rate decays."""
        for taken in range(len(self.growths), -1, -1):
            run = self._run(self.growths[:taken], budget, seed)
            if not taken or run.growths[-1].step <= run.decay_start:
                return run
        raise AssertionError("the trunk without growth is always there")

    def _run(self, growths: tuple[Growth, ...], budget: float, seed: int) -> Run:
        last = growths[-1].step if growths else 0
        run = Run(SHAPES[self.sizes[0]], self.lr, last, seed, growths, base=BASE)
        a_step = flops(replace(run, steps=last + 1)) - flops(run)
        return replace(run, steps=last + round((budget - flops(run)) / a_step))

    def branches(self, seed: int = 0) -> list[Run]:
        """One for every budget; each keeps the states from which the shorter ones' rates decay."""
        runs = [self.branch(budget, seed) for budget in BUDGETS]
        starts = [run.decay_start for run in runs]
        return [replace(run, marks=tuple(s for s in starts if s < run.decay_start)) for run in runs]


def ladder(name: str, lr: float) -> Ladder | None:
    """With growth steps where the law says, for the largest budget; None as long as the law is not known."""
    fitted = law(lr)
    if fitted is None:
        return None
    climb = best_climb(fitted, [size_of(size) for size in LADDERS[name]], BUDGETS[-1], TRANSFER)
    sizes = tuple(rung.size.name for rung in climb.rungs)
    growths, step = [], 0
    for rung, (small, large) in zip(climb.rungs, pairwise(sizes), strict=False):
        step += round(rung.seen / BYTES)
        growths.append(_step_up(step, SHAPES[small], SHAPES[large]))
    return Ladder(sizes, tuple(growths), lr)


def _step_up(step: int, small: TokenFormer, large: TokenFormer) -> Growth:
    depth = large.layers if large.layers != small.layers else 0
    return Growth(step, large.tokens / small.tokens, method="rotate", depth=depth)


def ladders(lr: float) -> dict[str, Ladder]:
    """Those that are known."""
    return {name: one for name in LADDERS if (one := ladder(name, lr)) is not None}


def plan() -> list[Run]:
    """Sizes from scratch with the budgets of the law, ladders, then larger budgets."""
    lr = rate_of(SHAPES[SMALLEST])
    if lr is None:
        return []
    runs = from_scratch(lr)
    fitted = [run for (_, budget), run in runs.items() if budget in FITTED]
    grown = [run for one in ladders(lr).values() for run in one.branches()]
    return [*fitted, *grown, *(run for (_, budget), run in runs.items() if budget not in FITTED)]
