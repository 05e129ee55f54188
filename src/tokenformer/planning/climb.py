"""When to grow: the ladder that reaches the lowest loss with a budget, by a scaling law.

Enters: sizes with their costs, a law, a budget in FLOPs, and how much of training survives growth. Leaves: a Climb, the
stages and what they should reach. A model that doubles goes on from its loss: as if it had been trained, at its new
size, for `transfer` times as long as the new size needs to that loss. 1 is the ceiling, nothing lost. A larger step
loses as much as the doublings that it is made of.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .law import ScalingLaw

LOSSES = 2000  # that are told apart, from where training begins to the lowest within reach
# Of the budget: no stage is shorter, so that none is all warm-up or all decay.
SHORTEST = 0.05
# An anytime ladder is judged at so many budgets, from the smallest of these shares of the whole budget up.
BUDGETS, SMALLEST_SHARE = 16, 1 / 32
SWITCHES = 50  # budgets at which it may grow


@dataclass(frozen=True)
class Size:
    """A model that a ladder may pass: its parameters, and the training FLOPs of a token or an image."""

    name: str
    parameters: int
    flops_per_unit: float


@dataclass(frozen=True)
class Rung:
    """One stage of a ladder: what it sees at this size.

    worth: how many steps of this size from scratch one step before it was worth; cost: what one of those steps cost, in
    steps of this size. Growth into this size pays if the first is larger than the second. None in the first stage.
    """

    size: Size
    seen: float
    loss: float
    worth: float | None = None
    cost: float | None = None


@dataclass(frozen=True)
class Climb:
    """A ladder worked out: its stages, the last of which ends with `loss`."""

    rungs: tuple[Rung, ...]

    @property
    def loss(self) -> float:
        return self.rungs[-1].loss

    @property
    def flops(self) -> float:
        return sum(rung.seen * rung.size.flops_per_unit for rung in self.rungs)


def survives(small: Size, large: Size, transfer: float) -> float:
    """The share of training that survives growth from one size to another."""
    return transfer ** math.log2(large.parameters / small.parameters)


def climbed(law: ScalingLaw, stages: Sequence[tuple[Size, float]], transfer: float) -> Climb:
    """What a ladder of these sizes reaches, each trained for so long."""
    rungs: list[Rung] = []
    as_long, spent = 0.0, 0.0  # what has been seen, in terms of the present size; FLOPs
    for size, seen in stages:
        worth = cost = None
        if rungs:
            before = sum(rung.seen for rung in rungs)
            share = survives(rungs[-1].size, size, transfer)
            as_long = share * float(law.seen_at(size.parameters, rungs[-1].loss))
            worth, cost = as_long / before, spent / before / size.flops_per_unit
        as_long += seen
        spent += seen * size.flops_per_unit
        rungs.append(Rung(size, seen, float(law.loss(size.parameters, as_long)), worth, cost))
    return Climb(tuple(rungs))


def best_climb(
    law: ScalingLaw, sizes: Sequence[Size], budget: float, transfer: float, *, last: Size | None = None
) -> Climb:
    """The ladder of some of these sizes, the smallest first, that reaches the lowest loss with `budget` FLOPs.

    It may have one stage only; with `last` it must end at that size. By dynamic programming over losses: the cheapest
    way to a loss at a size is from scratch, or from the cheapest way to a higher loss at a smaller size.
    """
    n = [size.parameters for size in sizes]
    longest = [budget / size.flops_per_unit for size in sizes]
    losses = np.geomspace(float(law.loss(n[0], longest[0] / 1e4)), float(law.loss(n[-1], longest[0])), LOSSES)
    needed = [law.seen_at(parameters, losses) for parameters in n]  # from scratch
    cost = np.full((len(sizes), LOSSES), np.inf)
    came_from = np.full((len(sizes), LOSSES, 2), -1)  # the smaller size and the loss at which it grew
    for j, size in enumerate(sizes):
        cost[j] = size.flops_per_unit * needed[j]
        # What growing from a smaller size at each loss costs, less what it then need not train.
        shares = np.array([survives(smaller, size, transfer) for smaller in sizes[:j]])
        carried = size.flops_per_unit * shares[:, None] * np.where(np.isfinite(needed[j]), needed[j], 0.0)
        ahead = np.where(cost[:j] >= SHORTEST * budget, cost[:j], np.inf) - carried
        if j:
            smaller = ahead.argmin(axis=0)
            gained = ahead[smaller, np.arange(LOSSES)]
            at = _place_of_least_so_far(gained)
            grown = gained[at] + cost[j]
            # Growth must leave time to train and to decay at this size.
            better = (grown < cost[j]) & (cost[smaller[at], at] <= (1 - SHORTEST) * budget)
            came_from[j, better] = np.stack([smaller[at], at], axis=1)[better]
            cost[j] = np.where(better, grown, cost[j])
    ends = range(len(sizes)) if last is None else [list(sizes).index(last)]
    reached = {j: int(np.flatnonzero(cost[j] <= budget)[-1]) for j in ends if (cost[j] <= budget).any()}
    end = max(reached, key=lambda j: reached[j])
    path = [(end, reached[end])]
    while came_from[path[0]][0] >= 0:
        smaller_size, grew_at = came_from[path[0]]
        path.insert(0, (int(smaller_size), int(grew_at)))
    stages = []
    for i, (j, mark) in enumerate(path):
        before = survives(sizes[path[i - 1][0]], sizes[j], transfer) * needed[j][path[i - 1][1]] if i else 0.0
        stages.append((sizes[j], float(needed[j][mark] - before)))
    # What the grid of losses left of the budget goes to the last stage.
    spent = sum(size.flops_per_unit * seen for size, seen in stages[:-1])
    stages[-1] = (stages[-1][0], (budget - spent) / stages[-1][0].flops_per_unit)
    return climbed(law, stages, transfer)


def anytime_climb(law: ScalingLaw, sizes: Sequence[Size], budget: float, transfer: float) -> Climb:
    """The ladder that one may stop anywhere: at no budget on the way is it far above the best size from scratch.

    Of all ladders, the one whose largest distance is least. Growth steps are moved one at a time until none helps.
    """
    budgets = np.geomspace(SMALLEST_SHARE * budget, budget, BUDGETS)
    switches = np.geomspace(SMALLEST_SHARE * budget, budget, SWITCHES)
    scratch = [[float(law.loss(size.parameters, spent / size.flops_per_unit)) for size in sizes] for spent in budgets]

    def distance(grows_at: Sequence[float]) -> tuple[float, float]:
        """The largest and the mean, the former in steps that are worth telling apart."""
        ladders = [stopped(law, sizes, grows_at, spent, transfer).loss for spent in budgets]
        above = [loss / min(peers) - 1 for loss, peers in zip(ladders, scratch, strict=True)]
        return round(max(above), 4), sum(above)

    best: list[float] = []
    for first in switches[:: SWITCHES // 5]:
        grows_at, before = [float(first)] * (len(sizes) - 1), None
        while before != grows_at:
            before = list(grows_at)
            for i in range(len(grows_at)):
                low, high = grows_at[i - 1] if i else 0.0, grows_at[i + 1] if i + 1 < len(grows_at) else budget
                tried = [[*grows_at[:i], float(at), *grows_at[i + 1 :]] for at in switches if low <= at <= high]
                grows_at = min([grows_at, *tried], key=distance)
        best = min([best or grows_at, grows_at], key=distance)
    return stopped(law, sizes, best, budget, transfer)


def stopped(law: ScalingLaw, sizes: Sequence[Size], grows_at: Sequence[float], spent: float, transfer: float) -> Climb:
    """What a ladder that grows at these budgets reaches if it stops at one."""
    ends = [min(at, spent) for at in (*grows_at, spent)]
    parts = np.diff([0.0, *ends])
    stages = [(size, part / size.flops_per_unit) for size, part in zip(sizes, parts, strict=True) if part > 0]
    return climbed(law, stages, transfer)


def _place_of_least_so_far(values: np.ndarray) -> np.ndarray:
    """Of every prefix, where its least value is."""
    least = np.minimum.accumulate(values)
    return np.maximum.accumulate(np.where(values == least, np.arange(len(values)), 0))
