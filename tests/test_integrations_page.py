"""The Python of docs/integrations.md runs, section by section; tests/integrations runs what needs trl and others."""

import pytest

from pages import imports, scripts
from test_packaging import INTEGRATIONS

SCRIPTS = {title: script for title, script in scripts("integrations.md").items() if not imports(script) & INTEGRATIONS}


@pytest.mark.parametrize("title", SCRIPTS)
def test_the_section_runs(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(SCRIPTS[title], {})
