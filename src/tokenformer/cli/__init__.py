"""The `tokenformer` command. Every command is a file of its own, and imports what it needs when it is run."""

from .app import app, main

__all__ = ["app", "main"]
