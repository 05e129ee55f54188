"""A trained model behind HTTP: OpenAI's interface, continuous batching, token groups as names of models."""

from .limits import Limits
from .models import Served
from .server import serve

__all__ = ["Limits", "Served", "serve"]
