"""Looking inside: what every token does, what a model does without it, what makes it fire, and one token more."""

from .ablation import ablate
from .ages import token_ages
from .attribution import Agreement, Effect, Effects, ablation_effects, agreement, attribute
from .statistics import TokenStatistics, neighbours, token_statistics
from .watching import Seen, SeenLayer, Top, watch

__all__ = [
    "Agreement",
    "Effect",
    "Effects",
    "Seen",
    "SeenLayer",
    "TokenStatistics",
    "Top",
    "ablate",
    "ablation_effects",
    "agreement",
    "attribute",
    "neighbours",
    "token_ages",
    "token_statistics",
    "watch",
]
