"""The server's page in a real browser: text streams, groups are chosen, settings stand side by side, nothing is run.

Needs Debian's chromium: `make test-docs` runs what is marked so.
"""

import re
from importlib.resources import files

import httpx
import pytest

from browsers import OVERFLOW, launched, wait
from serving_models import greedy, make_served, running
from tokenformer.serving import Limits

HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"


def test_the_page_asks_nobody_else():
    page = files("tokenformer.serving").joinpath("page.html").read_text()
    assert not re.search(r"https?://|//[a-z]|@import|innerHTML|insertAdjacentHTML|document\.write|eval\(", page)
    assert page.count("<script>") == page.count("<style>") == 1


@pytest.fixture
def browser():
    with launched() as browser:
        yield browser


@pytest.mark.docs
def test_sizes_side_by_side(browser, tmp_path):
    """The whole model and half of its tokens, with a group, compared on the page."""
    served, faults = make_served(sizes=(0.5, 0.25)), []
    with running(served) as server:
        page = browser.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(server.address)
        wait(page, "document.querySelectorAll('.size option').length === 6")
        a, b = page.locator(".panel").all()
        page.get_by_label("Compare two settings").check()
        assert b.get_by_label("Size").locator("option").all_text_contents() == [
            "all tokens",
            "0.5 of the tokens",
            "0.25 of the tokens",
        ]
        b.get_by_label("Size").select_option("0.5")
        page.get_by_label("Prompt").fill("hello")
        for names in ([], ["law"]):
            expected = {}
            for panel, model in ((a, "base"), (b, "base@0.5")):
                panel.locator(".temperature").fill("0")
                panel.locator(".tokens").fill("16")
                for name in names:
                    panel.get_by_label(name).check()
                asked = {"model": ":".join([model, *names]), "prompt": "hello", "max_tokens": 16, "temperature": 0}
                answer = httpx.post(f"{server.address}/v1/completions", json=asked, timeout=60).json()
                expected[panel] = "hello" + answer["choices"][0]["text"]
            assert len(set(expected.values())) == 2
            page.get_by_role("button", name="Generate").click()
            wait(page, "[...document.querySelectorAll('.said')].every(p => p.textContent.includes('a second'))")
            assert {panel: panel.locator("pre").text_content() for panel in expected} == expected
            page.screenshot(path=tmp_path / "sizes.png")
        page.set_viewport_size({"width": 400, "height": 900})
        assert page.evaluate(OVERFLOW) <= 0
    assert not faults, faults


@pytest.mark.docs
def test_the_page_in_a_browser(browser, tmp_path):
    served, faults = make_served(), []
    expected = {name: greedy(make_served(), name, "hello", 16) for name in ("base", "base:law+fr")}
    with running(served, limits=Limits(running=4, waiting=0)) as server:
        page = browser.new_page()
        page.on("console", lambda said: said.type == "error" and faults.append(said.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith((server.address, "data:")) or faults.append(asked.url))
        page.goto(server.address)
        wait(page, "document.title.startsWith('base')")
        a, b = page.locator(".panel").all()
        page.get_by_label("Compare two settings").check()
        assert not a.locator(".size").is_visible()  # there is nothing to choose
        for panel in (a, b):
            panel.locator(".temperature").fill("0")
            panel.locator(".tokens").fill("16")
        for name in ("law", "fr"):
            b.get_by_label(name).check()
        prompt = page.get_by_label("Prompt")
        prompt.fill("hello")
        prompt.press("Control+Enter")  # no mouse is needed
        wait(page, "[...document.querySelectorAll('.said')].every(p => p.textContent.includes('a second'))")
        assert a.locator("pre").text_content() == "hello" + expected["base"]
        assert b.locator("pre").text_content() == "hello" + expected["base:law+fr"]
        page.screenshot(path=tmp_path / "light.png")

        prompt.fill(HOSTILE)
        page.get_by_role("button", name="Generate").click()
        wait(page, f"document.querySelector('pre').textContent.length > {len(HOSTILE)}")
        wait(page, "!document.getElementById('go').disabled")
        assert a.locator("pre").text_content().startswith(HOSTILE)
        assert "run" not in page.title()

        a.locator(".tokens").fill("9999")
        page.get_by_label("Compare two settings").uncheck()
        prompt.fill("x")
        page.get_by_role("button", name="Generate").click()
        wait(page, "document.querySelector('.said.wrong')")
        assert "max_tokens" in a.locator(".said").text_content()
        faults = [fault for fault in faults if "400" not in fault]  # the browser reports the refusal itself

        a.locator(".tokens").fill("500")
        page.get_by_role("button", name="Generate").click()
        wait(page, "document.querySelector('.said').textContent.startsWith('Writing')")
        page.keyboard.press("Escape")
        wait(page, "document.querySelector('.said').textContent === 'Stopped.'")

        page.get_by_role("button", name="Dark or light").click()
        page.set_viewport_size({"width": 400, "height": 900})
        assert page.evaluate(OVERFLOW) <= 0
        page.screenshot(path=tmp_path / "dark.png")
        page.evaluate("document.activeElement.blur()")
        order = []
        for _ in range(7):
            page.keyboard.press("Tab")
            order.append(page.evaluate("document.activeElement.id"))
        assert {"prompt", "go", "compare", "chat"} <= set(order)
    assert not faults, faults


@pytest.mark.docs
def test_the_page_asks_for_the_key(browser):
    with running(make_served(), key="s3cret") as server:
        page = browser.new_page()
        page.goto(server.address)
        page.get_by_label("API key").fill("s3cret")
        page.get_by_label("API key").press("Enter")
        wait(page, "document.title.startsWith('base')")
