"""The documentation site: its navigation, its reference, and every built page in a real browser.

`make test-docs` runs this: it needs the extra `docs` and Debian's chromium, and has a marker of its own.
"""

import functools
import http.server
import importlib
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import tokenformer
from browsers import OVERFLOW, launched

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
SITE = ROOT / "build" / "docs" / "site"
WIDTHS = (400, 1200)
BROKEN_PICTURES = "[...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"
PARTS = ("cost", "data.images", "data.text", "evaluation", "inspecting", "planning", "report", "serving", "training")


def test_the_navigation_names_every_page():
    def leaves(node):
        return [node] if isinstance(node, str) else [leaf for one in node for leaf in leaves(_parts(one))]

    named = leaves(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md")]
    assert sorted(named) == sorted(str(page.relative_to(ROOT)) for page in pages)


def _parts(node):
    return next(iter(node.values())) if isinstance(node, dict) else node


def test_the_reference_has_every_public_name():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    named = set(re.findall(r"^::: (tokenformer\.[\w.]+)$", text, re.MULTILINE))
    assert set(tokenformer.__all__) <= {name.rpartition(".")[2] for name in named}
    for part in PARTS:
        public = importlib.import_module(f"tokenformer.{part}").__all__
        assert {f"tokenformer.{part}.{name}" for name in public} <= named, part


def test_the_reference_has_every_preset_of_the_language_model():
    rows = re.findall(r"^\| `(\S+)` \| (.*?) \|", (ROOT / "docs" / "api" / "models.md").read_text(), re.MULTILINE)
    shapes = {name: [int(number) for number in numbers.split(", ")] for name, numbers in rows}
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    assert shapes == {name: [shape[size] for size in sizes] for name, shape in tokenformer.PRESETS.items()}


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    """Build the site, which fails at any warning, and serve it."""
    run = subprocess.run([sys.executable, "docs/build.py"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    handler = functools.partial(QuietHandler, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.docs
def test_every_page_in_a_browser(address):
    """No broken picture, no error on the console, nothing asked of another host, nothing wider than the window."""
    faults = []
    with launched() as browser:
        page = browser.new_page()
        page.on("console", lambda said: said.type == "error" and faults.append((page.url, said.text)))
        page.on("pageerror", lambda error: faults.append((page.url, str(error))))
        page.on("request", lambda asked: asked.url.startswith(address) or faults.append((page.url, asked.url)))
        paths = sorted(path.relative_to(SITE) for path in SITE.rglob("*.html") if path.name != "404.html")
        assert len(paths) > 30
        for path in paths:
            page.goto(f"{address}{path}", wait_until="load")
            faults += [(str(path), f"broken picture {source}") for source in page.evaluate(BROKEN_PICTURES)]
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                over = page.evaluate(OVERFLOW)
                if over > 0:
                    faults.append((str(path), f"{over} pixels too wide at {width}"))
    assert not faults, "\n".join(map(str, faults))
