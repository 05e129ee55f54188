"""What the README and the docs promise: examples run, figures are those measured, and files they name exist."""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def commands(block: str) -> list[str]:
    return [line.split("#")[0].strip() for line in block.strip().splitlines()]


def test_the_first_screen_has_figure_install_example_and_the_two_commands():
    first_screen = "\n".join(README.splitlines()[:50])
    assert re.search(r"!\[[^]]+\]\([^)]+\)", first_screen)
    (_, install), (language, _), (_, make) = re.findall(r"```(\w+)\n(.*?)```", first_screen, re.DOTALL)
    assert commands(install) == ["pip install tokenformer", 'pip install "tokenformer[train]"']
    assert language == "python"
    assert commands(make) == ["make demo", "make test"]


def test_the_headline_is_what_was_measured():
    """The share of compute of all sizes, the saving on the largest alone, and how far the losses are apart."""
    results = json.loads((ROOT / "experiments" / "progressive_scaling" / "results.json").read_text())["findings"]
    ladder = results["variants"]["the same, with half the rate from 128 tokens on"]
    largest = results["scratch"]["256"]["tokenformer"]
    saved = 1 - ladder["sizes"]["256"]["flops"] / largest["flops"]
    assert f"for {ladder['of_from_scratch']:.0%} of the compute".replace("%", " %") in README
    assert f"growing saves {saved:.0%}".replace("%", " %") in README
    seeds = results["seeds"]["grown at 2000, then half the rate"].values()
    for tokens in ("64", "128"):
        grown = statistics.mean(seed["sizes"][tokens]["validation"] for seed in seeds if "sizes" in seed)
        scratch = results["scratch"][tokens]["tokenformer"]["validation"]["mean"]
        assert abs(grown / scratch - 1) < 0.0035
    assert abs(ladder["sizes"]["256"]["validation"] / largest["validation"]["mean"] - 1) < 0.0035
    assert "within 0.3 %" in README


def test_the_python_example_runs(tmp_path):
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert len([line for line in example.splitlines() if line and not line.startswith(("import", "from"))]) <= 10
    run = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "147,584 -> 278,656 parameters" in run.stdout


# Pages whose examples begin with a model or a run that the reader has; those of integrations.md have their own test.
NOT_HERE = {"evaluation.md", "official.md", "report.md", "integrations.md"}
FRAGMENTS = [
    pytest.param(example, id=f"{page.stem}-{number}")
    for page in sorted((ROOT / "docs").glob("*.md"))
    if page.name not in NOT_HERE
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), start=1)
    if "import onnxruntime" not in example  # which tests/integrations/test_exporting.py runs
]


@pytest.mark.parametrize("example", FRAGMENTS)
def test_an_example_runs_when_it_is_pasted(example, tmp_path, monkeypatch):
    """Each by itself, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENFORMER_CACHE", str(tmp_path / "cache"))
    exec(example, {})


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


# Folders whose pages are made, not written.
MADE = {"build", "dist", "runs"}
LONGEST_LINE = 120


def too_long(page: Path) -> list[str]:
    """The lines of a page that should be broken; tables, code, and a lone link or picture cannot be."""
    found, code = [], False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        text = line.strip()
        if text.startswith("```"):
            code = not code
        alone = re.fullmatch(r"([-*] )?!?\[[^]]*\]\([^)\s]*\)[.,;:]?", text)
        if len(line) > LONGEST_LINE and not (code or text.startswith("|") or alone):
            found.append(f"{page.relative_to(ROOT)}:{number} has {len(line)} characters")
    return found


def test_lines_of_prose_fit_in_a_window():
    pages = [page.relative_to(ROOT) for page in ROOT.rglob("*.md")]
    written = [page for page in pages if not any(part in MADE or part.startswith(".") for part in page.parts)]
    assert len(written) > 30
    assert not [line for page in sorted(written) for line in too_long(ROOT / page)]


def test_the_tour_has_every_room_and_the_files_it_names_are_there():
    tour = (ROOT / "docs" / "tour.md").read_text()
    packages = [path.parent for path in (ROOT / "src").glob("*/*/__init__.py")]
    around = [ROOT / name for name in ("benchmarks", "docs", "examples", "experiments", "recipes", "tests", "tests_hf")]
    for room in [*packages, *around, ROOT / "src" / "tokenformer_cli"]:
        assert f"{room.name}/`" in tour, room
    for section in tour.split("\n## ")[1:]:
        (room,) = re.findall(r"^`(?:src/)?([\w/]+)/`", section) or ["."]
        for name in re.findall(r"`([\w/.-]+\.py)`", section):
            library = ROOT / "src" / "tokenformer"
            places = (library / room, *(library / room).glob("*/"), library, ROOT / "src" / room, ROOT)
            assert any((place / name).exists() for place in places), f"{room}: {name}"


def test_the_files_that_contributors_are_sent_to_exist():
    named = re.findall(r"`([\w/.-]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert named
    for name in named:
        assert any((place / name).exists() for place in (ROOT, ROOT / "src" / "tokenformer")), name


def test_the_citation_names_the_paper():
    (paper,) = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    assert paper["url"] == "https://arxiv.org/abs/2410.23168"
    assert paper["title"] in README


# Python imports a module of this name when it starts: every connection and every look-up of a host is written down.
RECORDER = """
import os, socket, sys

def record(event, args):
    if event == "socket.getaddrinfo" or event == "socket.connect" and args[0].family != socket.AF_UNIX:
        with open(os.environ["CONNECTIONS"], "a") as file:
            file.write(f"{event} {args}\\n")

sys.addaudithook(record)
"""


class Demo:
    """The commands of `make demo`, with fewer steps, from which every connection is recorded."""

    def __init__(self, folder: Path):
        self.run, self.connections = folder / "demo", folder / "connections"
        (folder / "sitecustomize.py").write_text(RECORDER)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        more = {"COLUMNS": "140", "PYTHONPATH": path, "CONNECTIONS": str(self.connections)}
        self.environment = {**os.environ, **more}
        self.environment.pop("HF_HUB_OFFLINE", None)  # which would hide what a user's machine asks for
        lines = (ROOT / "Makefile").read_text().splitlines()
        train, report, generate = (line.split("tokenformer ")[1] for line in lines if "$(BIN)/tokenformer " in line)
        shorter = [f"growth.stages.{stage}.steps=2" for stage in range(3)]
        cache = folder / "cache"
        self.table = self.command(*train.split(), f"training.output_dir={self.run}", f"data.cache={cache}", *shorter)
        for rest in (report, generate.replace('"def test_"', "def")):
            self.command(*rest.replace("runs/demo", str(self.run)).split())

    def command(self, *words: str) -> str:
        return self.python("-m", "tokenformer", *words)

    def python(self, *words: str) -> str:
        command = [sys.executable, *words]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=self.environment)
        assert run.returncode == 0, run.stderr
        return run.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return Demo(tmp_path_factory.mktemp("demo"))


def test_the_demo_runs_and_growth_shows_no_jump(demo):
    rows = [line.split() for line in demo.table.splitlines() if line[:1].isdecimal()]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for before, row in itertools.pairwise(rows):
        assert row[4] == before[6]
        assert float(row[5]) == pytest.approx(float(row[4]), abs=2e-4)


def test_nothing_phones_home(demo):
    model = demo.run / "stage-3" / "model"
    demo.command("grow", str(model), str(demo.run / "grown"), "--factor", "2")
    load = f"import tokenformer; from transformers import pipeline; pipeline('text-generation', {str(model)!r})"
    demo.python("-c", load)
    assert not demo.connections.exists(), demo.connections.read_text()
    demo.python("-c", "import socket; socket.getaddrinfo('localhost', 80)")
    assert "localhost" in demo.connections.read_text()
