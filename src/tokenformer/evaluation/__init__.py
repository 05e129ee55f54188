"""How good a model is, as numbers."""

from .tasks import TaskScores, evaluate_tasks
from .text import TextScore, evaluate_text

__all__ = ["TaskScores", "TextScore", "evaluate_tasks", "evaluate_text"]
