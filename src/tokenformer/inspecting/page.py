"""The page: one HTML file that needs no other file and no network.

Enters: a sheet. Leaves: the HTML, with the files of page/ in it: its style, its script, and the sheet as JSON. By the
page's policy only these two count, and nobody is asked, or in the live page nobody but its server.
"""

import base64
import hashlib
import html
import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import BadRequestError
from ..io import naming, replace_file

# Written near the beginning of the file, to tell our pages from other people's files.
MADE_BY = "tokenformer inspect"
STYLES = ("page.css", "parts.css")
# In the order in which they use each other; they share one module scope.
SCRIPTS = (
    "dom.js",
    "sheet.js",
    "state.js",
    "text.js",
    "position.js",
    "card.js",
    "find.js",
    "growth.js",
    "live.js",
    "main.js",
)
MOST_BYTES = 5_000_000


def make_page(sheet: Mapping[str, Any], *, live: bool = False) -> str:
    """The whole page."""
    style, script = ("".join(_beside(name) for name in names) for names in (STYLES, SCRIPTS))
    parts = {
        "made_by": MADE_BY,
        "policy": policy(live),
        "title": html.escape(sheet["model"]["name"]),
        "style": style,
        "script": script,
        "sheet": json.dumps(sheet, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    before, *rest = _beside("page.html").split("{{")
    for part in rest:  # in one pass, so that nothing that is put in is looked through again
        name, _, after = part.partition("}}")
        before += parts[name] + after
    return before


def policy(live: bool) -> str:
    """Under which only the page's own script and style count, and no host is asked, or only that of the page."""
    sources = [
        f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for kind, names in (("style", STYLES), ("script", SCRIPTS))
        for text in ["".join(_beside(name) for name in names)]
    ]
    asked = ["connect-src 'self'"] if live else []
    return "; ".join(["default-src 'none'", "img-src data:", *sources, *asked, "form-action 'none'", "base-uri 'none'"])


def _beside(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def check_target(path: Path) -> None:
    """Refuse to write over what is not a page of ours."""
    if path.is_dir():
        raise BadRequestError(f"{path} is a folder; name a file, such as {path / 'inspect.html'}")
    if os.path.lexists(path) and not _is_ours(path):
        raise BadRequestError(f"{path} was not written by this command and would be overwritten; give another --out")


def _is_ours(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MADE_BY.encode() in file.read(400)


def write_page(page: str, path: Path) -> int:
    """Write a page, or replace an earlier one. Returns its size in bytes."""
    content = page.encode()
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return len(content)
