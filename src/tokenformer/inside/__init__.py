"""Looking inside: what every token does, what a model does without it, what makes it fire, and one token more."""

from .ablation import ablate
from .watching import Seen, SeenLayer, Top, watch

__all__ = ["Seen", "SeenLayer", "Top", "ablate", "watch"]
