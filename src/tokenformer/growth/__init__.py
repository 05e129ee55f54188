"""Growth by parameter tokens: plan it, grow the model, and let the optimizer follow."""

from .grow import apply_growth, grow
from .optimizer import grow_optimizer
from .plan import plan_growth
from .rates import parameter_groups
from .step import METHODS, Growth, LayerGrowth
from .ungrow import ungrow

__all__ = [
    "METHODS",
    "Growth",
    "LayerGrowth",
    "apply_growth",
    "grow",
    "grow_optimizer",
    "parameter_groups",
    "plan_growth",
    "ungrow",
]
