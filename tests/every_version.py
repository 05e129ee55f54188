"""The tests with the oldest and the newest packages that pyproject.toml allows, and the library with nothing else.

    make test-versions                      oldest, newest and empty, each in an environment under .cache/versions
    make test-versions PYTHON=python3.12    the same with another Python
    python tests/every_version.py NAME…     only these; `oldest-torch` too, several GB where torch has no CPU build

Not a test itself: it goes on after a failure and ends with a table. An environment that is complete is used again until
pyproject.toml or constraints.txt changes. torch is the build of constraints.txt, but in `oldest-torch`.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT, PINNED = (ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text()
TORCH = re.search(r"^torch==.*$", PINNED, re.MULTILINE)[0]
# The lower bounds of what the library needs; the tools of its developers come after it.
NEEDED = re.search(r"^dependencies = .*?^docs = ", PROJECT, re.MULTILINE | re.DOTALL)[0]
OLDEST = sorted({f"{name}=={version}" for name, version in re.findall(r'"([\w-]+)>=([\w.]+)', NEEDED)})
# What is installed, and the versions that are asked for.
ENVIRONMENTS = {
    "oldest": (".[dev]", [TORCH, *(line for line in OLDEST if not line.startswith("torch=="))]),
    "newest": (".[dev]", [TORCH]),
    "empty": (".", [TORCH]),
    "oldest-torch": (".[dev]", OLDEST),
}
FOLDER = ROOT / ".cache" / "versions" / f"python{sys.version_info.major}.{sys.version_info.minor}"


def make(name: str) -> Path:
    """The environment's Python, installed if it is not there yet."""
    what, constraints = ENVIRONMENTS[name]
    folder = FOLDER / name
    python, complete = folder / "bin" / "python", folder / "complete"
    content = hashlib.sha256("\n".join([PROJECT, *constraints]).encode()).hexdigest()
    if complete.exists() and complete.read_text() == content:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    file = folder / "constraints.txt"
    file.write_text("\n".join(constraints) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    editable = ["--editable"] if what != "." else []  # an empty environment gets the wheel
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    subprocess.run([*pip, "--constraint", file, *editable, what], cwd=ROOT, check=True)
    complete.write_text(content)
    return python


def run(name: str, python: Path) -> int:
    """The tests, or in the empty environment what a new user does first."""
    if name != "empty":
        return subprocess.run([python, "-m", "pytest", "-q", "-n", "auto"], cwd=ROOT).returncode
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run([python, ROOT / "tests" / "first_use.py"], cwd=folder).returncode


def main(names: list[str]) -> int:
    """Run them all; the exit code says whether every environment passed."""
    results = {}
    for name in names or ["oldest", "newest", "empty"]:
        print(f"== {name}", flush=True)
        try:
            python = make(name)
        except subprocess.CalledProcessError as error:
            results[name] = "could not be installed", error.returncode
            continue
        code = run(name, python)
        results[name] = "failed" if code else "passed", code
    packages = "import importlib.metadata as m; print(*(f'{p} {m.version(p)}' for p in ('torch', 'transformers')))"
    for name, (outcome, _) in results.items():
        python = FOLDER / name / "bin" / "python"
        listed = subprocess.run([python, "-c", packages], capture_output=True, text=True).stdout.strip()
        print(f"{outcome:8} {name}: Python {sys.version.split()[0]} {listed}")
    return max(code for _, code in results.values())


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)  # what is installed is what is tried
    sys.exit(main(sys.argv[1:]))
