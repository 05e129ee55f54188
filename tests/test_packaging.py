"""What pyproject.toml promises: every import is declared, each where it is needed, and a missing extra is named."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from command import run
from tokenformer.errors import EXTRAS, BadRequestError, require
from tokenformer.training.support import PRIVATE_METHODS, TRIED, check_trainer, version_warning
from tokenformer.training.trainer import LadderTrainer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
# Packages whose modules have another name.
MODULES = {"pyyaml": "yaml", "pillow": "PIL", "scikit-learn": "sklearn", "optimum-quanto": "optimum"}
OURS = {"tokenformer", "tokenformer_cli"}


def modules(requirements: list[str]) -> set[str]:
    """The modules of requirements such as `numpy>=2`."""
    names = [re.match(r"[\w.-]+", requirement)[0] for requirement in requirements]
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


EXTRA = PROJECT["optional-dependencies"]
INTEGRATIONS = modules(EXTRA["integrations"] + EXTRA["export"]) - OURS


def imported(path: Path, everywhere: bool) -> set[str]:
    """The packages that a file imports from elsewhere: everywhere in it, or only when it is imported itself."""
    tree, found = ast.parse(path.read_text()), set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - OURS


def test_every_import_is_declared():
    declared = modules(PROJECT["dependencies"]).union(*EXTRAS.values())
    for path in SOURCES:
        assert imported(path, everywhere=True) <= declared, path


def test_only_files_that_are_imported_late_need_an_extra_to_be_imported():
    base = modules(PROJECT["dependencies"])
    for path in SOURCES:
        if path.parent.name not in ("training", "serving") and not path.name.startswith(("triton_", "harness")):
            assert imported(path, everywhere=False) <= base, path


def test_errors_name_what_the_extras_bring():
    declared = PROJECT["optional-dependencies"]
    assert {extra: modules(declared[extra]) for extra in EXTRAS} == {e: set(names) for e, names in EXTRAS.items()}
    assert declared["all"] == [f"tokenformer[{','.join(extra for extra in EXTRAS if extra != 'export')}]"]
    assert "tokenformer[all]" in declared["dev"]


def test_every_direct_dependency_is_pinned_for_the_tests():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = modules([line for line in lines if not line.startswith("#")])
    assert modules(PROJECT["dependencies"]).union(*EXTRAS.values(), INTEGRATIONS) <= pinned


def test_what_the_tests_of_integrations_need_is_in_their_extra_and_in_no_other():
    asked = set()
    for path in (ROOT / "tests" / "integrations").glob("test_*.py"):
        asked |= set(re.findall(r'importorskip\("(\w+)', path.read_text()))
    assert asked
    assert asked <= INTEGRATIONS
    for extra, requirements in PROJECT["optional-dependencies"].items():
        assert extra in ("integrations", "export") or not INTEGRATIONS & modules(requirements)
    assert "tokenformer[export]" in EXTRA["integrations"]
    makefile = (ROOT / "Makefile").read_text()
    assert '-e ".[dev,integrations]"' in makefile
    assert ".cache/integrations/bin/python -m pytest tests/integrations\n" in makefile


def test_versions_are_one():
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {PROJECT['version']}\n" in (ROOT / "CHANGELOG.md").read_text()


def run_without_extras(code: str) -> str:
    """What code prints in a process in which nothing that an extra brings is installed."""
    gone = sorted(set().union(*EXTRAS.values()))
    code = f"import sys; sys.modules.update(dict.fromkeys({gone}))\n{code}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


REFUSAL = """
from typer.testing import CliRunner
from tokenformer_cli import app

def refusal(*arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    return result.stderr
"""


def test_the_library_works_without_any_extra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_without_extras(f"import runpy; runpy.run_path({str(ROOT / 'tests' / 'first_use.py')!r}, run_name='__main__')")


# What is asked for, and the extra that it needs.
STATEMENTS = {
    "from tokenformer.training import train": "train",
    "import tokenformer; tokenformer.training": "train",
    "from tokenformer.evaluation import evaluate_tasks; evaluate_tasks(None, None, 'piqa')": "eval",
    "from tokenformer.report.figures import draw_losses; draw_losses([], (), 0, False, '')": "report",
    "from tokenformer import Pattention; import torch; Pattention(4, 4, 4, form='triton')(torch.ones(1, 4))": "triton",
}
COMMANDS = {
    ("train", "recipes/demo.yaml"): "train",
    ("train", "recipes/demo.yaml", "--dry-run"): "train",
    ("prepare", "README.md"): "train",
    ("eval", "models/none", "--tasks", "piqa"): "eval",
    ("eval", "models/none", "--images", "digits"): "vision",
    ("export", "models/none", "exported"): "export",
}


def test_a_missing_extra_is_named_in_one_line():
    asked = [f"try:\n    {one}\nexcept ImportError as error:\n    print(error)\n" for one in STATEMENTS]
    asked += [f"print(refusal(*{arguments}), end='')\n" for arguments in COMMANDS]
    said = run_without_extras(REFUSAL + "".join(asked)).splitlines()
    extras = [*STATEMENTS.values(), *COMMANDS.values()]
    assert len(said) == len(extras), said
    for line, extra in zip(said, extras, strict=True):
        assert line.endswith(f'not installed; install the extra: pip install "tokenformer[{extra}]"')


def test_a_missing_module_is_named(monkeypatch):
    require("this", "train")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadRequestError, match=r"^this needs pyarrow, which is not installed; "):
        require("this", "train")
    require("this", "train", "accelerate")


def test_training_names_the_private_methods_of_trainer_that_it_uses():
    from transformers import Trainer

    overridden = {name for name in vars(LadderTrainer) if name.startswith("_") and not name.startswith("__")}
    overridden &= set(vars(Trainer))
    source = (ROOT / "src/tokenformer/training/trainer.py").read_text()
    called = {name for name in re.findall(r"(?:self|super\(\))\.(_\w+)\(", source) if hasattr(Trainer, name)}
    assert set(PRIVATE_METHODS) == {name for name in overridden | called if not name.startswith("__")}


def test_a_trainer_without_them_is_refused_with_the_minors_that_have_them():
    with pytest.raises(BadRequestError, match=r"^training needs transformers 5\.16 to 5\.\d+; 9\.9 is"):
        check_trainer(object, "9.9")


def test_the_versions_of_transformers_that_training_was_tried_with(monkeypatch):
    assert f"Tried with transformers {' to '.join(TRIED)}." in run("train", "--help").stdout
    for version in (f"{TRIED[0]}.1", f"{TRIED[1]}.0", f"{TRIED[1]}.9.dev0"):
        assert version_warning(version) is None
    monkeypatch.setattr("tokenformer.training.support.TRIED", ("5.16", "5.23"))
    for version in ("5.24.0", "5.24.0.dev0", "5.100.1", "6.0.0"):
        assert version_warning(version) == (
            f"training was tried with transformers 5.16 to 5.23, and {version} is installed; if it fails: "
            'pip install "transformers<5.24"'
        )
