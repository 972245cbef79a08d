"""The page in a real browser: its content, layout, accessibility and safety."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from math import log
from typing import Any

import pytest
from prometheus_client.registry import CollectorRegistry

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.metrics.endpoint import Endpoint, Page, json_response
from rayzero.orchestrator.page import page_response, render_page
from tests.orchestrator.page.browser import SIZES, TEXT, Browser, check_layout
from tests.orchestrator.page.sample import HTML, empty, empty_history, history, sample

OpenPage = Callable[[str], None]


@dataclass
class ServerState:
    """What the endpoint answers; without a snapshot it fails. The paths that were requested."""

    snapshot: dict[str, Any] | None = field(default_factory=sample)
    history: dict[str, Any] = field(default_factory=history)
    paths: set[str] = field(default_factory=set)

    def pages(self) -> dict[str, Callable[[], Page]]:
        def page(path: str, answer: Callable[[], Page]) -> Callable[[], Page]:
            def read() -> Page:
                self.paths.add(path)
                if self.snapshot is None:
                    raise RayzeroError("the job does not answer")
                return answer()

            return read

        answers: dict[str, Callable[[], Page]] = {
            "/": page_response,
            "/snapshot.json": lambda: json_response(self.snapshot),
            "/history.json": lambda: json_response(self.history),
        }
        return {path: page(path, answer) for path, answer in answers.items()}


@pytest.fixture
def state() -> ServerState:
    return ServerState()


@pytest.fixture
def url(state: ServerState) -> Iterator[str]:
    with closing(Endpoint("127.0.0.1", range(1), CollectorRegistry(), state.pages())) as endpoint:
        yield f"{endpoint.url}/"


@pytest.fixture
def open_page(tab: Browser, url: str) -> OpenPage:
    """Open the page and wait until it shows a text."""

    def open_and_wait(text: str) -> None:
        tab.open(url)
        is_drawn = "document.readyState == 'complete' && histories.length"
        tab.wait_for(
            f"location.href == '{url}' && {is_drawn} && {TEXT}.includes({json.dumps(text)})"
        )

    return open_and_wait


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_layout_fits_and_text_is_legible(
    tab: Browser, open_page: OpenPage, size: str, dark: bool
) -> None:
    tab.set_viewport(*SIZES[size], dark)
    open_page("12,345 of 20,000")
    check_layout(tab, SIZES[size][0])
    assert tab.screenshot_size() > 26_000
    assert tab.errors == []


def test_page_shows_all_values(tab: Browser, open_page: OpenPage, state: ServerState) -> None:
    tab.set_viewport(*SIZES["desktop"], dark=False)
    open_page("12,345 of 20,000")
    text = tab.evaluate(TEXT)
    for part in (
        "gpt-stdlib",
        "ZeRO stage 2",
        "running",
        "41 min 21 s",  # remaining
        "81,920",  # tokens/s
        "Samples/s",
        "CPU cores of a rank",
        "1.87",
        "GPU use",
        "93.0 %",
        "4 (of 2 to 4)",
        "65,536",
        "2.346",  # loss
        "90.3 %",  # goodput
        "steps redone",
        "recovering from faults",
        "16 s · 0.4 %",  # the sum of all recovery phases
        "rank 3",
        "silent for 14 s",
        "backward",
        "lost",
        "repaired",
        "resized",
        "2.98 GiB",
        "Learning rate",
        "Phases of a step",
        "accuracy",
        HTML,  # a name of a value, and text in the log
        "one/too/many",
        "6, 14 wait",  # tasks of the role
        "step 12,343, 1 behind",
        "41,237",
        "0.6172 (-1 to 1)",
        "0.75 (max 1 of 2)",
        "rollout 1 on node a hangs",
        "rollout: reward",
        "reward, for tasks",
        "3.1 % of a step",  # waiting for data
        f"s3://bucket/code/{HTML}",  # a source of a stream
        "Samples/s by source",
        "28 · 70 %",  # its share
        "99.9 %",  # found in memory
        "step 12199/20000",
        "gpus: 1",
    ):
        assert part in text, part
    assert tab.evaluate("document.querySelectorAll('#chart-loss path.curve').length") == 1
    assert tab.evaluate("document.querySelectorAll('#chart-loss path.fault').length") == 1  # nan
    assert tab.evaluate("document.querySelectorAll('#world path.fault').length") == 1
    assert tab.evaluate("document.querySelectorAll('#world line.saved').length") == 5
    assert tab.evaluate("document.getElementById('bar').getAttribute('aria-valuenow')") == "62"
    lane = "document.querySelectorAll('#lane-rollout path.size, #lane-rollout path.fault').length"
    assert tab.evaluate(lane) == 2
    assert tab.evaluate("document.title") == "running · gpt-stdlib"
    assert set(state.paths) <= {"/", "/snapshot.json", "/history.json"}


def test_values_are_not_interpreted_as_html(
    tab: Browser, open_page: OpenPage, state: ServerState
) -> None:
    assert state.snapshot is not None
    html = "<script>window.broken=1</script><img src=x onerror='window.broken=1'>"
    state.snapshot |= {"job": html, "version": html}
    state.snapshot["ranks"][0] |= {"node": html, "phase": html}
    state.snapshot["goodput"]["seconds"][html] = 5.0
    state.snapshot["checkpoints"][0]["step"] = html
    open_page("window.broken=1")
    assert tab.evaluate("document.querySelectorAll('img, main script').length") == 0
    assert tab.evaluate("window.broken === undefined")
    assert tab.errors == []
    tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'),"
        "{textContent: 'window.broken = 1'}))"
    )
    assert tab.evaluate("window.broken === undefined")
    assert any("Content Security Policy" in error for error in tab.errors)


def test_job_without_values(tab: Browser, open_page: OpenPage, state: ServerState) -> None:
    state.snapshot, state.history = empty(), empty_history()
    open_page("no value yet")
    for part in (
        "No process group has formed yet.",
        "No worker runs yet.",
        "no rank has reported yet",
        "pending",
    ):
        assert part in tab.evaluate(TEXT)
    assert "NaN" not in tab.evaluate(TEXT)
    assert "undefined" not in tab.evaluate(TEXT)
    assert tab.errors == []


def test_job_without_roles_and_streams_has_none_on_its_page(
    tab: Browser, open_page: OpenPage, state: ServerState
) -> None:
    assert state.snapshot is not None
    for part in ("roles", "rollouts", "streams"):  # of an earlier version
        del state.snapshot[part]
    open_page("12,345 of 20,000")
    assert "Roles" not in tab.evaluate(TEXT)
    assert "Streams" not in tab.evaluate(TEXT)
    assert tab.errors == []


def test_thousand_ranks(tab: Browser, open_page: OpenPage, state: ServerState) -> None:
    state.snapshot = sample(ranks=1000)
    tab.set_viewport(*SIZES["phone"], dark=False)
    open_page("1,000 (of 2 to 1,000)")
    assert tab.evaluate("document.querySelectorAll('#ranks li').length") == 1000
    assert tab.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"][0]
    assert tab.evaluate("document.getElementById('ranks').clientHeight") < 3000


def test_lost_connection_is_shown_until_restored_or_the_job_has_ended(
    tab: Browser, open_page: OpenPage, state: ServerState
) -> None:
    open_page("connected")
    state.snapshot = None
    tab.wait_for(f"{TEXT}.includes('these values are out of date')")
    assert tab.evaluate("document.body.classList.contains('stale')")
    state.snapshot = sample(state="succeeded")
    state.snapshot["progress"]["step"] = 12_999
    tab.wait_for(f"{TEXT}.includes('12,999')")
    assert not tab.evaluate("document.body.classList.contains('stale')")
    state.snapshot = None
    tab.wait_for(f"{TEXT}.includes('the job has ended')")
    assert not tab.evaluate("document.body.classList.contains('stale')")


def test_unknown_format_asks_for_reload(tab: Browser, url: str, state: ServerState) -> None:
    state.snapshot = sample() | {"format": 99}
    tab.open(url)
    tab.wait_for(f"{TEXT}.includes('reload it')")


def test_scrollable_regions_are_reachable_by_tab(tab: Browser, open_page: OpenPage) -> None:
    open_page("12,345 of 20,000")
    focused = []
    for _ in range(40):
        tab.press_key("Tab")
        focused.append(tab.evaluate("document.activeElement.getAttribute('aria-label')"))
    regions = ["Events", "Checkpoints", "End of the log", "Job file, with all defaults"]
    assert [name for name in focused if name in regions][:4] == regions
    assert {"Loss", "accuracy", "World size; 1 faults, 5 checkpoints"} <= set(focused)


def test_accessible_names(tab: Browser, open_page: OpenPage) -> None:
    open_page("12,345 of 20,000")
    tree = tab.call("Accessibility.getFullAXTree")["nodes"]
    named = {
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if "role" in node and not node.get("ignored")
    }
    for title in ("Progress", "Curves", "World size and faults", "Goodput", "Ranks"):
        assert ("heading", title) in named
        assert ("region", title) in named
    assert ("progressbar", "Progress") in named
    charts = {name for role, name in named if role == "slider"}
    assert {"Loss", "Phases of a step", "accuracy"} <= charts
    assert any(name.startswith("Smoothing") for name in charts)
    assert all(charts)


def test_cursor_of_pointer_and_keys_is_in_all_charts(tab: Browser, open_page: OpenPage) -> None:
    tab.set_viewport(*SIZES["desktop"], dark=False)
    open_page("12,345 of 20,000")
    visible = "document.querySelectorAll('#charts .cursor[visibility=visible]').length"
    readout = "document.querySelector('#chart-loss .readout').textContent"
    box = tab.evaluate(
        "(() => { const box = document.querySelector('#chart-loss .plot').getBoundingClientRect();"
        " return [box.left, box.top, box.width, box.height]; })()"
    )
    x, y = box[0] + 54 + (box[2] - 54 - 12) * 6000 / 12_300, box[1] + box[3] / 2
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    loss = history()["curves"]["loss"][100][1]
    assert tab.evaluate(readout).startswith(f"{loss:.4g} ")
    assert tab.evaluate(readout).endswith("step 6,000")
    assert (
        tab.evaluate(visible)
        == tab.evaluate("document.getElementById('charts').children.length") - 1
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert tab.evaluate(visible) == 0
    tab.evaluate("document.querySelector('#chart-lr .plot, #chart-rate .plot').focus()")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        tab.press_key(key)
    assert (
        tab.evaluate("document.activeElement.getAttribute('aria-valuetext')") == "step 120: 3.6e-5"
    )
    assert tab.evaluate(readout).endswith("step 120")
    tab.press_key("Escape")
    assert tab.evaluate(visible) == 0
    assert tab.errors == []


def test_log_scale_smoothing_and_time(tab: Browser, open_page: OpenPage) -> None:
    open_page("12,345 of 20,000")
    points = (
        "document.querySelector('#chart-loss path.curve:not(.raw)').getAttribute('d')"
        ".split(/[ML]/).slice(1).map((pair) => pair.split(' ').map(Number))"
    )
    loss = [row[1] for row in history()["curves"]["loss"]]

    def heights(values: list[float]) -> list[float]:
        """Of a few points, as shares of the way from the first to the last."""
        picked = [values[index] for index in (0, 20, 40, 79)]
        return [(value - picked[0]) / (picked[-1] - picked[0]) for value in picked]

    def drawn() -> list[float]:
        return heights([point[1] for point in tab.evaluate(points)])

    assert drawn() == pytest.approx(heights(loss), abs=0.01)
    tab.evaluate("document.getElementById('log').click()")
    assert drawn() == pytest.approx(heights([log(value) for value in loss[:80]]), abs=0.01)
    tab.evaluate("document.getElementById('log').click()")
    tab.evaluate(
        "(() => { const input = document.getElementById('smoothing'); input.value = 0.9;"
        " input.dispatchEvent(new Event('input')); })()"
    )
    smooth, total = [], 0.0
    for index, value in enumerate(loss[:80], start=1):  # as TensorBoard does
        total = 0.9 * total + 0.1 * value
        smooth.append(total / (1 - 0.9**index))
    assert drawn() == pytest.approx(heights(smooth), abs=0.01)
    assert tab.evaluate("document.querySelectorAll('#chart-loss path.curve.raw').length") == 1
    tab.evaluate("document.getElementById('by-time').click()")
    tab.evaluate("moveCursor({ axis: 'time', at: 31 + 6000 * 0.32 })")
    text = tab.evaluate("document.querySelector('#chart-loss .readout').textContent")
    assert text.endswith("step 6,000, after 32 min 31 s")
    assert tab.errors == []


def test_labels_of_an_axis_differ(tab: Browser, open_page: OpenPage) -> None:
    """However small the range of a curve is: two labels at least, and no two alike."""
    tab.set_viewport(*SIZES["desktop"], dark=False)
    open_page("12,345 of 20,000")
    ranges = [(1, 1.0001), (0.1230001, 0.1230002), (-3e-9, 5e-9), (1e6, 1e6 + 0.01), (0.5, 153.0)]
    ranges += [(81_920, 81_920.4), (59.9, 60.1), (3600, 3601), (2**31, 2**31 + 9000), (7, 7)]
    ranges += [(1.05, 2.58), (0.97, 1.53), (0, 1e-12), (1e12, 3e12), (0.019, 0.0204), (99, 101)]
    named = ("loss", "step_s", "mfu", "resident_bytes", "tokens_per_s")
    labels = """[...document.querySelectorAll('#charts figure')].map((figure) =>
      Object.values(Object.groupBy([...figure.querySelectorAll('text')],
        (text) => text.getAttribute('x') === '48' ? 'y' : 'x'))
        .map((texts) => texts.map((text) => text.textContent)))"""
    tab.evaluate("showHistory = () => {}")  # of the server
    for low, high in ranges:
        for last in (2, 3, 500):
            rows = [[1, low], [last, high]]
            times = [[1, 31.0], [last, 31 + 0.2 * last]]
            shown = history() | {"curves": {**dict.fromkeys(named, rows), "elapsed_s": times}}
            for by_time in ("false", "true"):
                tab.evaluate(f"view.byTime = {by_time}; showCurves([{json.dumps(shown)}])")
                for axes in tab.evaluate(labels):
                    assert len(axes) == 2, (low, high, last, by_time)
                    for texts in axes:
                        assert len(texts) == len(set(texts)) >= 2, (low, high, last, texts)
    tab.evaluate("view.byTime = false")
    assert tab.errors == []


def test_thin_phases_are_one_visible_layer(tab: Browser, open_page: OpenPage) -> None:
    """update and mirror are 1 % and 0.4 % of a step: their values are in the legend."""
    tab.set_viewport(*SIZES["desktop"], dark=False)
    open_page("12,345 of 20,000")
    layers = "[...document.querySelectorAll('#chart-phases .layer')]"
    assert tab.evaluate(f"{layers}.length") == 5
    box = f"{layers}.at(-1).getBoundingClientRect().height"
    assert tab.evaluate(f"{layers}.at(-1).classList.contains('thin') && {box} >= 1")
    items = "[...document.querySelectorAll('#chart-phases .legend li')].map((one) => one.innerText)"
    legend = [item.split() for item in tab.evaluate(items)]
    assert [item[0] for item in legend] == ("data forward backward reduce update mirror").split()
    assert legend[-1][-2:] == ["0.35", "%"]
    widths = "[...document.querySelectorAll('.share > span')].map((one) => one.offsetWidth)"
    assert min(tab.evaluate(widths)) >= 2  # recovery: 0.4 % of 4,000 s


def test_fault_is_a_visible_dip(tab: Browser, open_page: OpenPage) -> None:
    """Two of four ranks for 10 s of an hour are wide enough to be seen."""
    tab.set_viewport(*SIZES["phone"], dark=False)
    open_page("12,345 of 20,000")
    path = tab.evaluate("document.querySelector('#world path.size').getAttribute('d')")
    ends = [tuple(map(float, pair)) for pair in re.findall(r"V([\d.]+)H([\d.]+)", path)]
    (full, fault), (dip, formed), (less, _), (again, _) = ends
    bottom = float(path.rsplit("V", 1)[1])
    shares = [(bottom - y) / (bottom - full) for y in (full, dip, less, again)]
    assert shares == pytest.approx([1, 0.5, 0.75, 1])
    assert formed - fault >= 4


def test_page_is_small_and_self_contained() -> None:
    text = render_page()
    assert len(text.encode()) < 76_000
    assert "@@" not in text
    assert not re.search(
        r"(src|href)=[\"'](?!snapshot\.json|metrics|jobs\.csv|steps\.csv|#|data:,)", text
    )
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "innerHTML" not in text
    for control in ("<form", "method:", "POST"):
        assert control not in text
