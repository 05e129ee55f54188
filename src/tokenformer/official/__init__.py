"""The paper's authors' checkpoints: into a model folder and back. docs/official.md is the page for users."""

from .convert import Conversion, export_official, import_official

__all__ = ["Conversion", "export_official", "import_official"]
