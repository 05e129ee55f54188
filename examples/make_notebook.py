"""Make grow_a_model.ipynb from grow_a_model.py, and run it.

    python examples/make_notebook.py

Enters: a script whose cells begin with `# %%`. Leaves: a notebook of the same cells with what they printed and drew. It
needs the extra `docs`.
"""

from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "grow_a_model.py"


def cells(text: str) -> list[tuple[str, str]]:
    """The cells of a script: kind (markdown or code), and source."""
    found = []
    for cell in text.split("# %%")[1:]:
        head, _, body = cell.partition("\n")
        if head.strip() == "[markdown]":
            found.append(("markdown", "\n".join(line.removeprefix("#").strip() for line in body.strip().splitlines())))
        else:
            found.append(("code", body.strip()))
    return found


def make(script: Path) -> None:
    """Write the notebook beside its script."""
    import nbformat  # here, so that the tests can compare cells without the extra
    from nbclient import NotebookClient

    new = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    notebook = nbformat.v4.new_notebook(cells=[new[kind](source) for kind, source in cells(script.read_text())])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    NotebookClient(notebook, kernel_name="python3").execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # random otherwise
        cell.metadata = {}  # the times at which it ran
        if cell.cell_type == "code":  # warnings there are about the machine it ran on
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, script.with_suffix(".ipynb"))


if __name__ == "__main__":
    make(SCRIPT)
