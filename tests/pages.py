"""The Python that a page shows, section by section, as scripts that tests run.

Enters: a page whose sections begin with `## `. Leaves: by title, all Python of a section as one script, and what that
script imports.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def scripts(page: str) -> dict[str, str]:
    """The scripts of docs/PAGE; sections without Python have none."""
    sections = (ROOT / "docs" / page).read_text().split("\n## ")[1:]
    found = {each.partition("\n")[0]: "".join(re.findall(r"```python\n(.*?)```", each, re.DOTALL)) for each in sections}
    return {title: script for title, script in found.items() if script}


def imports(script: str) -> set[str]:
    """The packages that a script imports."""
    found = set()
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found
