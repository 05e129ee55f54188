"""Looking inside: what every token does, what a model does without it, what makes it fire, and one token more."""

from .ablation import ablate
from .ages import token_ages
from .attribution import Agreement, Effect, Effects, ablation_effects, agreement, attribute
from .editing import Edit, edit
from .index import Example, IndexedToken, TokenIndex, Word
from .indexing import index_tokens
from .statistics import TokenStatistics, neighbours, token_statistics
from .watching import Seen, SeenLayer, Top, watch

__all__ = [
    "Agreement",
    "Edit",
    "Effect",
    "Effects",
    "Example",
    "IndexedToken",
    "Seen",
    "SeenLayer",
    "TokenIndex",
    "TokenStatistics",
    "Top",
    "Word",
    "ablate",
    "ablation_effects",
    "agreement",
    "attribute",
    "edit",
    "index_tokens",
    "neighbours",
    "token_ages",
    "token_statistics",
    "watch",
]
