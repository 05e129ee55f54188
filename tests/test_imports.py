"""Importing is light, and imports point one way: pattention -> models -> growth -> … -> cli."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tokenformer"
# Each room may import from the ones before it, and nobody from the ones after it.
ROOMS = [
    "errors",
    "files",
    "data",
    "pattention",
    "nn",
    "models",
    "cost",
    "growth",
    "adoption",
    "api",
    "evaluation",
    "training",
    "official",
    "report",
    "cli",
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


def test_the_script_answers_without_torch():
    heavy = {"torch", "transformers", "numpy"}
    asked_for_help = "import sys, tokenformer_command as script; sys.argv = ['tokenformer', 'grow', '--help']; "
    asked_for_help += "sys.exit = lambda code: None; script.main()"
    assert not heavy & loaded_by(asked_for_help)


def test_in_the_script_every_name_comes_when_it_is_asked_for():
    """As in code that transformers runs from a model folder, which imports our classes by name."""
    code = "import tokenformer_command, tokenformer; from tokenformer import *; "
    code += "from transformers import AutoConfig; assert tokenformer.grow is grow and callable(pattention); "
    code += "assert isinstance(AutoConfig.for_model('tokenformer'), tokenformer.TokenFormerConfig)"
    assert "tokenformer.nn" in loaded_by(code)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    inner = len(path.relative_to(SOURCE).parts) - 1
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == inner + 1 and node.module:
            other = node.module.split(".")[0]
            assert ROOMS.index(other) < ROOMS.index(room), f"{path} imports {other}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_file_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
