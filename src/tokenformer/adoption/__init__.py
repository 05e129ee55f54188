"""Existing Transformers become TokenFormers, exactly: `adopt`, the families it knows, and a way to add one."""

from .adopt import adopt
from .families import FAMILIES, Family, Fed, register_family

__all__ = ["FAMILIES", "Family", "Fed", "adopt", "register_family"]
