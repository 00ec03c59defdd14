"""The page at `/` in a browser: at a desk and on a phone it writes, colours and measures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import openai
import pytest
from support.daemon.browser import CHROMIUM, Browser, running_browser
from support.daemon.daemons import DaemonProcess

PROMPT = "def read_lines(path):\n"
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
_OWN = "[...document.querySelectorAll('#text .t')]"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


def open_page(browser: Browser, daemon: DaemonProcess, width: int, height: int) -> None:
    """Opens the page, and forgets the conversation of an earlier test."""
    browser.trouble.clear()
    browser.open(daemon.url + "/", width, height)
    browser.wait_for("document.querySelectorAll('#mode option').length === 5")
    browser.run("document.getElementById('new').click()")


def write(browser: Browser, **fields: object) -> None:
    """Fills the form in and waits for the line below the text."""
    for name, value in {"prompt": PROMPT, "kind": "text", **fields}.items():
        browser.run(f"document.getElementById({name!r}).value = {json.dumps(value)}")
    browser.run("document.getElementById('go').click()")
    browser.wait_for("document.getElementById('go').textContent === 'Write'")


@needs_chromium
@pytest.mark.parametrize("size", SIZES)
def test_it_writes_the_daemons_text_in_colours_and_measures(
    browser: Browser, daemon: DaemonProcess, client: openai.OpenAI, size: str
) -> None:
    width, height = SIZES[size]
    open_page(browser, daemon, width, height)
    assert "target (float32, cpu)" in browser.run("document.getElementById('about').textContent")
    write(browser, max="24", seed="7", mode="speculative")
    note = browser.run("document.getElementById('note').textContent")
    assert note.startswith("24 tokens · ") and "seed 7 · exact · length" in note
    expected = client.completions.create(model="outrider", prompt=PROMPT, seed=7, max_tokens=24)
    assert browser.run("document.querySelector('.said').textContent") == PROMPT
    assert browser.run("document.getElementById('text').textContent") == expected.choices[0].text

    origins = set(browser.run(f"{_OWN}.map((span) => span.classList[1])"))
    assert {"accepted", "correction"} <= origins <= {"accepted", "correction", "bonus", "target"}
    colours = browser.run(f"{_OWN}.map((span) => getComputedStyle(span).backgroundColor)")
    assert len(set(colours)) == len(origins & {"accepted", "correction"}) + bool(
        origins & {"bonus", "target"}
    )
    shown = {
        name: browser.run(f"document.getElementById({name!r}).textContent")
        for name in ("rtt", "acceptance", "depth", "speed", "unverified")
    }
    assert re.fullmatch(r"[\d.]+ ms", shown["rtt"]) and re.fullmatch(r"\d+ %", shown["acceptance"])
    assert re.fullmatch(r"\d+", shown["depth"]), "the median, not the last round's, which the text's end cut"
    assert shown["unverified"] == "0" and browser.run("document.querySelectorAll('#bars rect').length") > 4

    wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert browser.run(wide), "nothing sticks out at the side"
    outside = (
        "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > innerWidth)"
    )
    assert browser.run(f"{outside}.length") == 0
    if size == "phone":
        assert browser.run("document.getElementById('go').getBoundingClientRect().height") >= 44, "a thumb's"
    assert browser.trouble == []


@needs_chromium
def test_what_the_daemon_refuses_is_said_below_the_text(browser: Browser, daemon: DaemonProcess) -> None:
    open_page(browser, daemon, 1280, 800)
    write(browser, prompt="word " * 5000)
    assert "context" in browser.run("document.getElementById('note').textContent")
    assert browser.run("document.getElementById('note').className") == "note bad"
    assert browser.run("document.getElementById('go').textContent") == "Write", "ready for the next one"
    browser.trouble.clear()  # the browser logs the 400 itself


@needs_chromium
def test_a_text_from_elsewhere_is_text_and_no_page(browser: Browser, daemon: DaemonProcess) -> None:
    open_page(browser, daemon, 390, 844)
    prompt = "<img src=x onerror=alert(1)><script>document.title = 'taken'</script>"
    write(browser, prompt=prompt, max="4", seed="1")
    assert browser.run("document.querySelector('.said').textContent") == prompt
    assert browser.run("document.querySelectorAll('.turn img, .turn script').length") == 0
    assert browser.run("document.title") == "Outrider" and browser.trouble == []


@needs_chromium
def test_a_conversation_goes_on_and_survives_a_reload(
    browser: Browser, daemon: DaemonProcess, client: openai.OpenAI
) -> None:
    open_page(browser, daemon, 390, 844)
    settings = {"max": "24", "seed": "7", "mode": "speculative"}
    write(browser, **settings)
    assert browser.run("document.getElementById('prompt').value") == ""
    write(browser, prompt="\n\nx", **settings)
    first = client.completions.create(model="outrider", prompt=PROMPT, seed=7, max_tokens=24).choices[0].text
    longer = PROMPT + first + "\n\nx"
    second = client.completions.create(model="outrider", prompt=longer, seed=7, max_tokens=24).choices[0].text
    texts = "[...document.querySelectorAll('.turn .text')].map((each) => each.textContent)"
    assert browser.run(texts) == [first, second]
    compared = "document.querySelector('.turn:last-child .compare').textContent"
    browser.run("document.querySelector('.turn:last-child .measure').click()")
    browser.wait_for(f"{compared}.includes('measured')")
    assert re.fullmatch(
        r"[\d.]+ s here; by the target alone [\d.]+ s, measured; the same text", browser.run(compared)
    )
    browser.wait_for("document.getElementById('go').textContent === 'Write'")

    coloured = browser.run(f"{_OWN}.map((span) => span.className)")
    browser.open(daemon.url + "/", 390, 844)
    browser.wait_for("document.querySelectorAll('.turn').length === 2")
    assert (
        browser.run(texts) == [first, second]
        and browser.run(f"{_OWN}.map((span) => span.className)") == coloured
    )
    browser.run("document.getElementById('new').click()")
    assert browser.run("document.querySelectorAll('.turn').length") == 0 and browser.trouble == []


def test_nothing_of_the_page_comes_from_elsewhere(daemon: DaemonProcess) -> None:
    page = daemon.get("/").decode()
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "@import" not in page
