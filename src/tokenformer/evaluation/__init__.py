"""How good a model is, as numbers."""

from .images import ImageScore, evaluate_images
from .tasks import TaskScores, evaluate_tasks
from .text import TextScore, evaluate_text

__all__ = ["ImageScore", "TaskScores", "TextScore", "evaluate_images", "evaluate_tasks", "evaluate_text"]
