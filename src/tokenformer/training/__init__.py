"""Training a model up a ladder of growth stages: recipes, the Trainer beneath, checkpoints that survive anything."""

from . import support  # noqa: F401 - before what it checks is imported
from .ladder import Ladder, Stage
from .recipe import Recipe, load_recipe
from .run import train

__all__ = ["Ladder", "Recipe", "Stage", "load_recipe", "train"]
