"""The `tokenformer` command, a package beside the library, so that help and typos need not wait for torch.

app.py and a file for each command have the options, and import the library inside the command. facts.py and scores.py
do the larger commands' work; they import the library at the top, and are only imported once a command runs.
"""

from .app import app, main

__all__ = ["app", "main"]
