"""The README's example is run as it stands, and the files it names are there."""

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


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_tour_names_every_file():
    tour = (ROOT / "docs" / "tour.md").read_text()
    for path in (ROOT / "src" / "tokenformer").glob("*/*.py"):
        if path.name != "__init__.py" and path.parent.name in ("pattention", "nn", "models", "growth"):
            assert f"`{path.name}`" in tour, path


def test_the_demo_runs_and_growth_shows_no_jump():
    run = subprocess.run(
        [sys.executable, "recipes/demo.py", "--steps", "2", "2"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    rows = [re.findall(r"[\d.,]+|-", line) for line in run.stdout.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["1", "2"]
    before, after = float(rows[1][3]), float(rows[1][4])
    assert before == pytest.approx(float(rows[0][5]), abs=1e-4)
    assert after == pytest.approx(before, abs=1e-4)
