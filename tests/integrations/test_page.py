"""The sections of docs/integrations.md and docs/inference.md that need a package of the extra `integrations` run."""

import pytest

from pages import imports, scripts
from test_packaging import INTEGRATIONS

PAGES = scripts("integrations.md") | scripts("inference.md")
SCRIPTS = {title: script for title, script in PAGES.items() if imports(script) & INTEGRATIONS}


@pytest.mark.parametrize("title", SCRIPTS)
def test_the_section_runs(title, tmp_path, monkeypatch):
    for package in imports(SCRIPTS[title]) & INTEGRATIONS:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    exec(SCRIPTS[title], {})
