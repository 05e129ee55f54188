"""Transformers that exist become TokenFormers, exactly: `adopt`, the families it knows, and a way to add one."""

from .families import FAMILIES, Family, Fed, register_family
from .surgery import adopt

__all__ = ["FAMILIES", "Family", "Fed", "adopt", "register_family"]
