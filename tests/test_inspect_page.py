"""The page of what tokens do in a real browser: every control does what it says, and nothing in a text is run.

Needs Debian's chromium: `make test-docs` runs it.
"""

import re
import threading

import pytest

from browsers import OVERFLOW, launched, wait
from conftest import make_tiny_vision
from inspecting_models import HOSTILE, TEXT, save_run
from tokenformer.inspecting import load_inspection, write_inspection

ANSWERED = "document.querySelector('#live [aria-busy]').getAttribute('aria-busy') === 'false'"
READY = "document.querySelector('#pieces [data-at]') && document.querySelector('#position h2')"
PHONE, MIDDLE, DESKTOP = (390, 844), (1000, 800), (1440, 900)

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture
def opened(browser):
    """Opens an address at a size, and fails at the end if the page reported an error or asked anybody else."""
    faults, pages = [], []

    def open_page(url, size=DESKTOP, scheme="light"):
        page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        page.on("console", lambda said: said.type in ("error", "warning") and faults.append(said.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        own = url.partition("#")[0]
        page.on("request", lambda asked: asked.url.startswith((own, "data:", "blob:")) or faults.append(asked.url))
        page.goto(url)
        wait(page, READY)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not faults, faults


def write(folder, path, **what):
    written = write_inspection(load_inspection(folder, **what), path)
    assert written.size < 5_000_000
    return path.as_uri()


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    return write(folder, tmp_path_factory.mktemp("page") / "page.html", prompt=TEXT.encode())


def text(page, selector):
    return page.locator(selector).first.text_content()


def test_every_control_does_what_it_says(opened, url):
    page = opened(url)
    assert "stage-2/model" in page.title()
    assert page.locator("#tab-live").count() == 0  # nobody answers
    page.locator("[data-at='20']").click()
    assert text(page, "#position h2") == f"Position 21 of {len(TEXT)}"
    assert page.locator("#here").get_attribute("data-at") == "20"
    assert page.locator("#position .bars li").count() == 6
    assert page.locator("#position .layer").count() == 2
    page.locator("#position .filter select").select_option("all")
    assert page.locator("#position .layer").count() == 10
    first = page.locator("#position .layer").first
    assert first.locator("li").count() == 5
    first.get_by_role("button", name="more").click()
    assert page.locator("#position .layer").first.locator("li").count() > 5

    token = page.locator("#position .token").first
    number = token.locator(".id").text_content()
    token.click()
    assert text(page, "#token h2").startswith(number)
    assert page.locator("#colour").input_value() == "token"
    assert page.locator("#pieces [data-level]").count() > 0
    assert "Fires most at" in text(page, "#token")
    place = page.locator("#token .place").first
    at = int(re.search(r"\d+", place.get_attribute("title")).group())
    place.click()
    assert text(page, "#position h2") == f"Position {at} of {len(TEXT)}"
    assert number in text(page, "#token h2")  # the card stays
    link = page.url
    neighbour = page.locator("#token button.chip").first
    if neighbour.count():
        neighbour.click()
        assert number != page.locator("#token h2").text_content().split(" ")[0]

    page.keyboard.press("/")
    page.keyboard.type("or not")
    assert page.locator("#find .place").count() == 9
    page.locator("#find .place").first.click()
    assert text(page, "#position h2") == f"Position {TEXT.index('or not') + 1} of {len(TEXT)}"
    page.locator("#tab-find").click()
    search = page.get_by_label("Search for")
    search.fill("t")
    assert page.locator("#find .line .id").count() > 0
    search.fill(number)
    assert {found.partition("new")[0] for found in page.locator("#find .line .id").all_text_contents()} == {number}
    search.fill("")
    for order in ("choosy", "helps", "harms", "newest", "use"):
        page.locator("#find select").first.select_option(order)
        assert page.locator("#find .line").count() == 40
    page.locator("#find .line").first.click()
    assert page.locator("body").get_attribute("data-tab") == "token"

    page.locator("#tab-growth").click()
    assert "growth step 1" in text(page, "#growth")
    for button, colour in ((0, "growth"), (1, "new")):
        page.locator("#growth button", has_text="Colour").nth(button).click()
        assert page.locator("#colour").input_value() == colour
        assert page.locator("#pieces [data-level]").count() > 0
    page.locator("#growth .line").first.click()
    assert "came with growth step 1" in text(page, "#token")
    assert page.locator("#token .bars.wide li").count() == 2
    page.locator("#colour").select_option("surprise")
    assert page.locator("#pieces [data-level^='-']").count() == 0

    again = opened(link)
    assert text(again, "#position h2") == f"Position {at} of {len(TEXT)}"
    assert number in text(again, "#token h2")


def test_without_a_mouse(opened, url):
    page = opened(url)
    page.locator("#pieces").focus()
    for key, at in (("Home", 1), ("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", len(TEXT))):
        page.keyboard.press(key)
        assert text(page, "#position h2") == f"Position {at} of {len(TEXT)}"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert text(page, "#position h2") == f"Position {TEXT.index('or') + 1} of {len(TEXT)}"
    page.keyboard.press("ArrowUp")
    assert text(page, "#position h2") == f"Position 1 of {len(TEXT)}"
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"colour", "token", "tab-token"} <= reached | {name.partition(" ")[0] for name in reached}, reached
    page.locator("#tab-token").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-find"
    assert page.locator("#find").is_visible()
    page.locator("#position .token").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.locator("#colour").input_value() == "token"


@pytest.mark.parametrize("size", [PHONE, MIDDLE, DESKTOP], ids=["phone", "middle", "desktop"])
def test_it_fits_by_day_and_by_night(opened, url, size, tmp_path):
    papers = set()
    for scheme in ("light", "dark"):
        page = opened(url, size, scheme)
        papers.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for tab in ("position", "token", "find", "growth"):
            page.evaluate(f"document.getElementById('tab-{tab}').click()")
            assert page.evaluate(OVERFLOW) <= 0, (scheme, tab)
        page.screenshot(path=tmp_path / f"{scheme}.png")
        page.get_by_role("button", name="Dark or light").click()
        papers.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(papers) == 2


def test_hostile_text_is_shown_and_never_run(opened, folder, tmp_path):
    (tmp_path / "long.txt").write_text(HOSTILE + "<b>" + "x" * 10**6)
    page = opened(write(folder, tmp_path / "page.html", text=tmp_path / "long.txt", layers=["layers.1.ffn"]), PHONE)
    shown = text(page, "#pieces")
    assert shown.startswith("<script>document.title='owned'</script><img src=x")
    assert "⟨00⟩" in shown
    assert "⟨U+202E⟩" in shown
    assert "שלום" in shown.replace("·", "")
    assert not re.search("[\x00\u202e\u2066\x1b]", page.content())
    assert page.evaluate("document.querySelectorAll('#pieces script, #pieces img, #pieces b').length") == 0
    assert "owned" not in page.title()
    assert "of a file of" in text(page, ".note")
    assert page.evaluate(OVERFLOW) <= 0
    page.locator("#tab-find").click()
    page.get_by_label("Search for").fill("<script>")
    assert page.locator("#find .place").count() == 1
    assert "owned" not in page.title()
    hostile = (
        page.url.partition("#")[0] + "#at=99999999&token=1e9.<b>&colour=<script>&tab=live&switched=0.0x1e999&without=x"
    )
    page.goto("about:blank")
    page.goto(hostile)
    wait(page, READY)
    assert page.locator("body").get_attribute("data-tab") == "position"


def test_an_image(opened, tmp_path):
    from PIL import Image

    make_tiny_vision().save_pretrained(tmp_path / "model")
    Image.effect_noise((64, 64), 90).convert("RGB").save(tmp_path / "image.png")
    page = opened(write(tmp_path / "model", tmp_path / "page.html", image=tmp_path / "image.png"))
    assert page.locator(".grid img").evaluate("image => image.naturalWidth") > 0
    page.locator("#pieces [data-at='9']").click()
    assert text(page, "#position h2").startswith("Patch 10 of")
    page.locator("#pieces").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#position .bars li").count() == 6
    page.locator("#position .token").first.click()
    assert page.locator(".grid [data-level]").count() > 0


def test_the_live_page(opened, folder):
    pytest.importorskip("transformers", "5.22")
    from tokenformer.inspecting.live_server import LiveServer

    server = LiveServer(load_inspection(folder, prompt=TEXT.encode()), port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        page = opened(server.address)
        page.locator("[data-at='40']").click()
        page.locator("#position .token").first.click()
        title = text(page, "#token h2")
        off = page.get_by_role("button", name="Switch off")
        off.click()
        assert off.get_attribute("aria-pressed") == "true"
        page.locator("#tab-live").click()
        assert "off" in text(page, "#live .switches")
        wait(page, ANSWERED)
        assert page.locator("#live pre").count() == 2
        said = text(page, "#live .bars")
        shared = page.url
        page.get_by_label("without all tokens of growth step 1").check()
        wait(page, f"document.querySelector('#live .bars').textContent !== {said!r}")
        page.get_by_role("button", name="Undo").click()
        wait(page, f"document.querySelector('#live .bars').textContent === {said!r}")
        page.locator("#live h2").click()
        page.keyboard.press("Control+z")
        assert "No token is switched" in text(page, "#live")
        assert page.get_by_role("button", name="Undo").is_disabled()

        page.locator("#tab-token").click()
        slider = page.get_by_label("Scale what it adds")
        slider.focus()
        page.keyboard.press("End")
        assert text(page, "#token output") == "× 3"
        page.get_by_role("button", name="See what changes").click()
        assert "× 3" in text(page, "#live .switches")
        page.get_by_role("button", name="Colour the text by what changes").click()
        wait(page, "document.getElementById('colour').value === 'change'")
        page.get_by_role("button", name="All as it was").click()
        assert "No token is switched" in text(page, "#live")

        page.get_by_label("Another text").fill(HOSTILE)
        page.get_by_role("button", name="Look at this text").click()
        wait(page, "document.getElementById('facts').textContent.includes('typed in')")
        assert text(page, "#pieces").startswith("<script>")
        assert "owned" not in page.title()

        again = opened(shared)  # a link has the switches
        wait(again, "document.querySelectorAll('#live pre').length === 2")
        assert title.split(" ")[0] in text(again, "#live .switches")
        assert text(again, "#live .bars") == said
    finally:
        server.drain()
        server.drain()
        thread.join(timeout=60)
    assert not thread.is_alive()
