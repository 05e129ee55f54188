"""Importing is light, and imports point one way: pattention -> models -> growth -> … -> report."""

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tokenformer.integrations.on_import import on_import
from tokenformer_cli import app

SOURCE = Path(__file__).parent.parent / "src" / "tokenformer"
RECIPE = SOURCE.parent.parent / "recipes" / "demo.yaml"
# Each room may import from the ones before it, and nobody from the ones after it.
ROOMS = [
    "errors",
    "io",
    "memory",
    "schema",
    "pattention",
    "nn",
    "models",
    "cost",
    "growth",
    "shrinking",
    "quantisation",
    "adoption",
    "groups",
    "inside",
    "serving",
    "inspecting",
    "integrations",
    "exporting",
    "data",
    "evaluation",
    "training",
    "official",
    "report",
    "planning",
]


def loaded_by(code: str) -> set[str]:
    """The modules a fresh process has after running `code`."""
    code += "; import sys, json; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_importing_the_library_loads_little_beyond_transformers():
    """By what is loaded, not by the clock; benchmarks/import_time.py has the seconds."""
    bare = loaded_by("from transformers import PreTrainedModel, AutoModelForCausalLM, GenerationMixin")
    extra = {name.split(".")[0] for name in loaded_by("import tokenformer") - bare}
    assert extra <= {"tokenformer", "transformers", "torch"}


def test_a_run_on_text_loads_no_code_for_images():
    loaded = loaded_by(f"from tokenformer.training import load_recipe, train; load_recipe({str(RECIPE)!r})")
    assert "tokenformer.data.text.data" in loaded
    assert not {name for name in loaded if name.startswith(("tokenformer.data.images", "kornia"))}


def test_the_command_answers_without_the_library():
    """Help, a typo, and options that do not go together: none of them waits for torch."""
    arguments = [
        *([name, "--help"] for name in get_command(app).commands),
        ["--version"],
        ["grow", "--fctor", "2"],
        ["grow", "a", "b", "--factor", "2", "--to", "124m"],
        ["eval", "a", "--text", "b", "--limit", "3"],
        ["adopt", "a", "b", "--grow", "much"],
        ["prepare", "a", "--split", "half"],
        ["train", str(RECIPE), "training.lerning_rate=1"],
    ]
    code = "from tokenformer_cli import app; from typer.testing import CliRunner; "
    code += f"codes = [CliRunner().invoke(app, each).exit_code for each in {arguments}]; "
    code += f"assert codes == [0] * {len(arguments) - 6} + [2] * 6, codes"
    assert not {"tokenformer", "torch", "transformers", "numpy"} & loaded_by(code)


def rooms_imported(code: str, package: str) -> set[str]:
    """The rooms of tokenformer that code in `package` imports, in whatever form; "__init__" for the library itself."""
    modules = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            within = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*within, *([node.module] if node.module else [])])
            modules += [f"{source}.{name.name}" for name in node.names]
    ours = [module.split(".")[1:] for module in modules if module.split(".")[0] == "tokenformer"]
    return {parts[0] if parts and parts[0] in ROOMS else "__init__" for parts in ours}


@pytest.mark.parametrize(
    ("code", "rooms"),
    [
        ("from .. import cost", {"cost"}),
        ("from ..cost import parameters", {"cost"}),
        ("from ..models.card import write_card as write", {"models"}),
        ("from .plan import Growth", {"growth"}),
        ("from . import plan", {"growth"}),
        ("import tokenformer.cost.counts", {"cost"}),
        ("from tokenformer import cost, io", {"cost", "io"}),
        ("from tokenformer.training import train", {"training"}),
        ("def late():\n    from .. import training", {"training"}),
        ("from .. import grow", {"__init__"}),
        ("import tokenformer", {"__init__"}),
        ("import torch.nn, tokenformers.cost", set()),
    ],
)
def test_every_form_of_import_is_seen(code, rooms):
    assert rooms_imported(code, "tokenformer.growth") == rooms


def test_every_room_has_its_place():
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__", "__main__"} == set(ROOMS)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    package = ".".join(["tokenformer", *path.relative_to(SOURCE).parent.parts])
    assert rooms_imported(path.read_text(), package) <= allowed


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_file_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_a_module_that_is_looked_for_is_still_watched(tmp_path, monkeypatch):
    """To look for a module, as transformers does for its optional ones, is not to import it."""
    (tmp_path / "watched_module.py").write_text("ran = True")
    monkeypatch.syspath_prepend(tmp_path)
    told = []
    on_import("watched_module", told.append)
    assert importlib.util.find_spec("watched_module") is not None
    assert not told
    module = importlib.import_module("watched_module")
    assert told == [module]
    on_import("watched_module", told.append)
    assert told == [module, module]
