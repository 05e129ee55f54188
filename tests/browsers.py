"""Debian's chromium under playwright, for tests of pages: `make test-docs` runs those."""

import shutil
import time
from contextlib import contextmanager

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# How far a page can be scrolled sideways.
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@contextmanager
def launched():
    """A browser, closed again in the end."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "chromium is missing: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


def wait(page, true):
    """Until an expression is true. Playwright's own way would need a policy that lets the page call eval."""
    end = time.monotonic() + 60
    while not page.evaluate(true):
        assert time.monotonic() < end, true
        page.wait_for_timeout(20)
