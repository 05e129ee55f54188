"""The page `tokenformer inspect`: what every token of a model does in one text or image, to be looked at."""

from .folder import Inspection, Written, load_inspection, write_inspection

__all__ = ["Inspection", "Written", "load_inspection", "write_inspection"]
