"""The example in examples/: its script runs, and the notebook made from it has the same cells and has been run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT = EXAMPLES / "grow_a_model.py"
sys.path.insert(0, str(EXAMPLES))

from make_notebook import cells  # noqa: E402


def test_the_script_runs(tmp_path):
    """With fewer steps. The notebook's cells are the script's."""
    shorter = {**os.environ, "STEPS": "10", "MPLBACKEND": "agg"}
    run = subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, env=shorter, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before, grown, after = [float(line.split()[-1]) for line in run.stdout.splitlines() if "held-out" in line]
    assert abs(grown - before) <= 0.001
    assert after < before


def test_the_notebook_is_the_script_and_has_been_run():
    notebook = json.loads(SCRIPT.with_suffix(".ipynb").read_text())
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert found == cells(SCRIPT.read_text()), "run python examples/make_notebook.py"
    outputs = []
    for number, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        assert cell["execution_count"] == number + 1
        outputs += cell["outputs"]
    assert "error" not in {output["output_type"] for output in outputs}
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.docs
def test_the_notebook_runs(tmp_path, monkeypatch):
    """As it is in the file, with fewer steps."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("STEPS", "10")
    notebook = nbformat.read(SCRIPT.with_suffix(".ipynb"), as_version=4)
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    assert any("held-out" in text for text in printed)
