"""The wheel, in an environment that has only it and what it asks for: the script, the data files, what one does first.

The packages it asks for, and those that they ask for in turn, are links to the ones that the tests run with, so that
nothing is downloaded. `make test-versions` installs everything for real.
"""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tokenformer.errors import EXTRAS

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing an earlier build left behind gets into it."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    built = run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."),
        cwd=folder,
    )
    assert built.returncode == 0, built.stderr
    (path,) = (folder / "dist").iterdir()
    return path


def asked_for(requirements: list[str], known: set[str]) -> set[str]:
    """The names of packages that requirements ask for without any extra, directly or through others."""
    for line in requirements:
        requirement = Requirement(line)
        if requirement.name not in known and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            known.add(requirement.name)
            asked_for(distribution(requirement.name).requires or [], known)
    return known


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The Python of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    installed = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        lines = files.read(metadata).decode().splitlines()
    prefix = "Requires-Dist: "
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    for name in asked_for([line.removeprefix(prefix) for line in lines if line.startswith(prefix)], set()):
        there = distribution(name)
        for part in {file.parts[0] for file in there.files or []} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(there.locate_file(part))
    return python


def test_what_is_installed_is_what_it_asks_for(python):
    checked = run(sys.executable, "-m", "pip", "--python", python, "check")
    assert checked.returncode == 0, checked.stdout
    code = f"import importlib.util as u; print([name for name in {EXTRAS['train']} if u.find_spec(name)])"
    assert run(python, "-c", code).stdout == "[]\n"


def test_what_one_does_first(python, tmp_path):
    used = run(python, ROOT / "tests" / "first_use.py", cwd=tmp_path)
    assert used.returncode == 0, used.stderr


def test_the_script_is_there_and_names_a_missing_extra(python, tmp_path):
    script = python.with_name("tokenformer")
    assert "grow" in run(script, "--help", cwd=tmp_path).stdout
    version = run(script, "--version", cwd=tmp_path).stdout
    assert f'version = "{version.split()[1]}"\n' in (ROOT / "pyproject.toml").read_text()
    refused = run(script, "train", "recipe.yaml", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.endswith('pip install "tokenformer[train]"\n')


def test_it_has_every_file_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as files:
        inside = {name for name in files.namelist() if ".dist-info/" not in name}
    paths = [path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file()]
    source = {path.as_posix() for path in paths if path.parts[0] in ("tokenformer", "tokenformer_cli")}
    assert inside == {name for name in source if not name.endswith(".pyc")}
