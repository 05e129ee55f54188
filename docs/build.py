"""The documentation site, from the README, docs/, the experiments' pages and the docstrings; `make docs` runs this.

    python docs/build.py

Enters: Markdown, laid out as in the repository, so that a link works there and on the site. Leaves: build/docs/site,
HTML that opens from the disk and never uses the network; only its search needs a server. Any warning, such as that of a
link that leads nowhere, ends it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "docs"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")


def pages() -> list[Path]:
    """Every Markdown page of the site."""
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "experiments").rglob("*.md")),
    ]


def gather(folder: Path) -> None:
    """Copy the pages, and the files that they link to, into a folder."""
    for page in pages():
        text = page.read_text()
        for link in sorted(set(LINK.findall(text))):
            target = (page.parent / link).resolve()
            if target.is_dir() and (target / "README.md").exists():
                # A forge shows a folder by its README; a site has only the page.
                text = text.replace(f"]({link})", f"]({link.rstrip('/')}/README.md)")
            elif target.is_file() and target.suffix != ".md":
                copy(target, folder)
        # A number is not parted from its percent sign at the end of a line; code between fences stays as it is.
        parts = text.split("```")
        parts[::2] = [re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", part) for part in parts[::2]]
        name = folder / page.relative_to(ROOT)
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_text("```".join(parts))
    for path in (ROOT / "docs" / "assets").glob("*.css"):
        copy(path, folder)


def copy(path: Path, folder: Path) -> None:
    """Copy a file of the repository to the same place below a folder."""
    name = folder / path.relative_to(ROOT)
    name.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, name)


def build() -> None:
    """Build the site, or stop at the first warning."""
    shutil.rmtree(BUILD, ignore_errors=True)  # with the generator's cache, which does not see a docstring change
    gather(BUILD / "pages")
    shutil.copyfile(ROOT / "zensical.toml", BUILD / "zensical.toml")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    run = subprocess.run(command, cwd=BUILD, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(run.stdout, end="")
    if run.returncode or "warning" in run.stdout.lower():
        sys.exit(run.returncode or 1)
    site = (BUILD / "site").relative_to(ROOT)
    print(f"open {site}/index.html; for the search, serve it: python -m http.server -d {site}")


if __name__ == "__main__":
    build()
