"""A trained model behind HTTP: OpenAI's interface, continuous batching, token groups as names of models."""

from .limits import Limits
from .models import Served, load_served
from .server import Server

__all__ = ["Limits", "Served", "Server", "load_served"]
