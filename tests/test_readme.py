"""The README's example is run as it stands, and the files it names are there."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_first_lines_are_the_two_commands():
    first = README.split("```sh\n")[1].split("```")[0]
    assert [line.split("#")[0].strip() for line in first.strip().splitlines()] == ["make demo", "make test"]
    assert README.index("make test") < 400


def test_the_python_example_runs(tmp_path):
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert len(example.strip().splitlines()) <= 12
    run = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "147,584 -> 278,656 parameters, the same function" in run.stdout
    assert (tmp_path / "grown-model" / "model.safetensors").exists()


def test_the_examples_of_the_layer_run():
    names = {}
    for example in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "layer.md").read_text(), re.DOTALL):
        exec(example, names)
    assert names["y"].shape == (2, 5, 32)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_tour_names_every_file():
    tour = (ROOT / "docs" / "tour.md").read_text()
    for path in (ROOT / "src" / "tokenformer").glob("*/*.py"):
        if path.name != "__init__.py" and path.parent.name not in ("official", "cli"):
            assert f"`{path.name}`" in tour, path


def test_the_demo_runs_and_growth_shows_no_jump(tmp_path):
    """The commands of `make demo`, with fewer steps."""
    makefile = (ROOT / "Makefile").read_text()
    recipe = next(line for line in makefile.splitlines() if "tokenformer train" in line).split()[-1]
    command = [sys.executable, "-m", "tokenformer"]
    run = subprocess.run(
        [*command, "train", recipe, f"training.output_dir={tmp_path / 'demo'}", f"data.cache={tmp_path / 'cache'}"]
        + [f"growth.stages.{stage}.steps=2" for stage in range(3)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "140"},
    )
    assert run.returncode == 0, run.stderr
    rows = [line.strip("│").split("│") for line in run.stdout.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in row] for row in rows]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for before, row in itertools.pairwise(rows):
        assert row[4] == before[6]
        assert float(row[5]) == pytest.approx(float(row[4]), abs=2e-4)
