"""Smaller models: what every token does on data, the tokens in that order, and a model without those that do least."""

from .measure import rank_tokens
from .shrink import shrink, sort_tokens

__all__ = ["rank_tokens", "shrink", "sort_tokens"]
