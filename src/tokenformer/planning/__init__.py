"""Should a model grow, and when: a scaling law, the best ladder for a budget, and a recipe of it."""

from .climb import Climb, Size, anytime_climb, best_climb, climbed
from .law import PUBLISHED, FinishedRun, ScalingLaw, fit
from .plan import Plan, make_plan
from .runs import FinishedLadder, fitted_transfer, read_finished

__all__ = [
    "PUBLISHED",
    "Climb",
    "FinishedLadder",
    "FinishedRun",
    "Plan",
    "ScalingLaw",
    "Size",
    "anytime_climb",
    "best_climb",
    "climbed",
    "fit",
    "fitted_transfer",
    "make_plan",
    "read_finished",
]
