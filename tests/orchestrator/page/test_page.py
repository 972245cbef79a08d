"""The page shows a job as it is told, in a real browser, and whatever it is told is only text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rayzero.orchestrator.page import page_response, render_page
from tests.orchestrator.page.browser import Browser, browser
from tests.orchestrator.page.sample import empty, sample

TEXT = "(document.body?.innerText ?? '')"
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}


@dataclass
class Told:
    """What the server answers; None: it hangs up."""

    value: dict[str, Any] | None = field(default_factory=sample)
    paths: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    def __init__(self, told: Told, *args: Any) -> None:
        self._told = told
        super().__init__(*args)

    def do_GET(self) -> None:
        self._told.paths.append(self.path)
        if self.path == "/":
            self._answer(*page_response())
        elif self.path == "/snapshot.json" and self._told.value is not None:
            self._answer("application/json", json.dumps(self._told.value).encode())
        else:
            self.close_connection = True

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Not the test's output."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def url(told: Told) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, told)) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join(10)


@pytest.fixture
def shows(tab: Browser, url: str) -> Callable[[str], None]:
    """Opens the page, and waits until it shows that text."""

    def open_it(text: str) -> None:
        tab.errors.clear()
        tab.open(url)
        tab.wait_for(f"location.href == '{url}' && {TEXT}.includes({json.dumps(text)})")

    return open_it


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits_and_looks_as_wanted(
    tab: Browser, shows: Callable[[str], None], size: str, dark: bool, tmp_path: Path
) -> None:
    tab.look(*SIZES[size], dark)
    shows("12,345 of 20,000")
    width = SIZES[size][0]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(_OVERFLOWING) == []
    assert tab.evaluate(_LOW_CONTRAST) == []
    tab.picture(tmp_path / f"{size}.png")
    assert (tmp_path / f"{size}.png").stat().st_size > 20_000
    assert tab.errors == []


def test_everything_told_is_shown(tab: Browser, shows: Callable[[str], None], told: Told) -> None:
    tab.look(*SIZES["desktop"], dark=False)
    shows("12,345 of 20,000")
    text = tab.evaluate(TEXT)
    for part in (
        "gpt-stdlib",
        "ZeRO stage 2",
        "running",
        "41 min 21 s",  # left
        "81,920",  # tokens/s
        "4 (of 2 to 4)",
        "65,536",
        "2.346",  # loss
        "90.3 %",  # goodput
        "steps redone",
        "recovering from faults",
        "16 s · 0.4 %",  # its parts in one
        "rank 3",
        "silent for 14 s",
        "backward",
        "lost",
        "repaired",
        "resized",
        "2.98 GiB",
    ):
        assert part in text, part
    assert tab.evaluate("document.querySelectorAll('#loss path.curve').length") == 1
    assert tab.evaluate("document.querySelectorAll('#world path.fault').length") == 1
    assert tab.evaluate("document.querySelectorAll('#world line.saved').length") == 5
    assert tab.evaluate("document.getElementById('bar').getAttribute('aria-valuenow')") == "62"
    assert tab.evaluate("document.title") == "running · gpt-stdlib"
    assert set(told.paths) <= {"/", "/snapshot.json"}


def test_what_is_told_is_only_text(tab: Browser, shows: Callable[[str], None], told: Told) -> None:
    assert told.value is not None
    nasty = "<script>window.broken=1</script><img src=x onerror='window.broken=1'>"
    told.value |= {"job": nasty, "version": nasty}
    told.value["ranks"][0] |= {"node": nasty, "phase": nasty}
    told.value["goodput"]["seconds"][nasty] = 5.0
    told.value["checkpoints"][0]["step"] = nasty
    shows("window.broken=1")
    assert tab.evaluate("document.querySelectorAll('img, main script').length") == 0
    assert tab.evaluate("window.broken === undefined")
    assert tab.errors == []


def test_even_a_script_in_it_would_not_run(tab: Browser, shows: Callable[[str], None]) -> None:
    shows("12,345 of 20,000")
    tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'),"
        "{textContent: 'window.broken = 1'}))"
    )
    assert tab.evaluate("window.broken === undefined")
    assert any("Content Security Policy" in one for one in tab.errors)


def test_a_job_that_has_only_begun(tab: Browser, shows: Callable[[str], None], told: Told) -> None:
    told.value = empty()
    shows("No loss has been reported yet.")
    for part in ("No process group has formed yet.", "no rank has reported yet", "pending"):
        assert part in tab.evaluate(TEXT)
    assert "NaN" not in tab.evaluate(TEXT)
    assert "undefined" not in tab.evaluate(TEXT)
    assert tab.errors == []


@pytest.mark.parametrize("size", SIZES)
def test_a_thousand_ranks(
    tab: Browser, shows: Callable[[str], None], told: Told, size: str, tmp_path: Path
) -> None:
    told.value = sample(ranks=1000)
    tab.look(*SIZES[size], dark=False)
    shows("1,000 (of 2 to 1,000)")
    assert tab.evaluate("document.querySelectorAll('#ranks li').length") == 1000
    assert tab.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    assert tab.evaluate("document.getElementById('ranks').clientHeight") < 3000
    tab.picture(tmp_path / f"{size}.png")


def test_it_says_when_it_lost_contact_and_when_it_is_back(
    tab: Browser, shows: Callable[[str], None], told: Told
) -> None:
    shows("connected")
    told.value = None
    tab.wait_for(f"{TEXT}.includes('these values are out of date')")
    assert tab.evaluate("document.body.classList.contains('stale')")
    told.value = sample()
    told.value["progress"]["step"] = 12_999
    tab.wait_for(f"{TEXT}.includes('12,999')")
    assert not tab.evaluate("document.body.classList.contains('stale')")


def test_the_silence_of_a_job_that_ended_is_no_loss(
    tab: Browser, shows: Callable[[str], None], told: Told
) -> None:
    told.value = sample(state="succeeded")
    shows("succeeded")
    told.value = None
    tab.wait_for(f"{TEXT}.includes('the job has ended')")
    assert not tab.evaluate("document.body.classList.contains('stale')")


def test_another_format_is_not_guessed_at(tab: Browser, url: str, told: Told) -> None:
    told.value = sample() | {"format": 99}
    tab.open(url)
    tab.wait_for(f"{TEXT}.includes('reload it')")


def test_all_that_can_be_scrolled_is_reached_by_keys(
    tab: Browser, shows: Callable[[str], None]
) -> None:
    shows("12,345 of 20,000")
    reached = []
    for _ in range(3):
        tab.press("Tab")
        reached.append(tab.evaluate("document.activeElement.getAttribute('aria-label')"))
    assert reached == [None, "Events", "Checkpoints"]


def test_readers_of_screens_get_names(tab: Browser, shows: Callable[[str], None]) -> None:
    shows("12,345 of 20,000")
    tree = tab.call("Accessibility.getFullAXTree")["nodes"]
    named = {
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if "role" in node and not node.get("ignored")
    }
    for title in ("Progress", "Loss", "World size and faults", "Goodput", "Ranks"):
        assert ("heading", title) in named
        assert ("region", title) in named
    assert ("progressbar", "Progress") in named
    images = [name for role, name in named if role in ("image", "img")]
    assert len(images) == 3
    assert all(images)
    assert any(name.startswith("Loss from") for name in images)


def test_it_is_one_small_file_that_asks_for_nothing_else() -> None:
    text = render_page()
    assert len(text.encode()) < 40_000
    assert "@@" not in text
    assert not re.search(r"(src|href)=[\"'](?!snapshot\.json|metrics|#|data:,)", text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "innerHTML" not in text
    for control in ("<form", "<button", "<input", "method:", "POST"):
        assert control not in text


_OVERFLOWING = """
[...document.querySelectorAll('section, section *')].filter((one) => {
  const scrolls = one.closest('.scroll');
  const box = one.getBoundingClientRect();
  return !scrolls && box.width > 0 && box.right > document.documentElement.clientWidth + 1;
}).map((one) => one.outerHTML.slice(0, 200))
"""

_LOW_CONTRAST = """
(() => {
  const light = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    if (parts.length > 3 && parts[3] === 0) return null;
    const [r, g, b] = parts.slice(0, 3).map((one) => {
      one /= 255;
      return one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const found = light(getComputedStyle(one).backgroundColor);
      if (found !== null) return found;
    }
    return 1;
  };
  const poor = [];
  for (const one of document.querySelectorAll('body *')) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || one.closest('script, style, svg, .skip')) continue;
    const [a, b] = [light(getComputedStyle(one).color), behind(one)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(one.outerHTML.slice(0, 120));
  }
  return poor;
})()
"""
