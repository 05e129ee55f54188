"""How good a model is, as numbers."""

from .text import TextScore, evaluate_text

__all__ = ["TextScore", "evaluate_text"]
