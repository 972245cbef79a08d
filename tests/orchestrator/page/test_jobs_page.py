"""`rayzero page`: the jobs of a folder, what they write there, and how a browser compares them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from math import nan
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.journal.files import JournalFiles
from rayzero.orchestrator.journal.writer import JournalWriter
from rayzero.orchestrator.metrics.jobs_page import JobsPage
from rayzero.orchestrator.metrics.run_files import RunFiles, restore_curves
from rayzero.orchestrator.metrics.telemetry import Telemetry
from rayzero.orchestrator.progress import StepRecord
from tests.orchestrator.fake_cluster import FakeCluster
from tests.orchestrator.page.browser import Browser, start_browser
from tests.orchestrator.page.sample import HTML, START_S, history, sample
from tests.orchestrator.page.test_page import LOW_CONTRAST, OVERFLOWING, SIZES, TEXT
from tests.orchestrator.support import NO_FILES, Harness, VirtualClock, async_test, plan

LOST_AT_S = START_S + 4000.0


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def write_run(folder: Path, name: str, shift: float = 0.0, **changes: Any) -> None:
    (folder / name).mkdir()
    snapshot = sample() | {"job": name, "began_s": START_S + 100 * shift} | changes
    (folder / name / "snapshot.json").write_text(json.dumps(snapshot))
    (folder / name / "history.json").write_text(json.dumps(history(name, shift)))


def journal(folder: Path, name: str, **end: str) -> None:
    """A run whose journal alone is there, or beside its other files."""
    (folder / name).mkdir(exist_ok=True)
    files = JournalFiles(str(folder / name))
    writer = JournalWriter(lambda update: files.write([update]), now_s=lambda: START_S)
    spec = {"name": name, "steps": 50, "workers": {"min": 1, "max": 1}}
    writer.append("begun", run="1", spec=spec, working_dir="/", by_value=False)
    if end:
        writer.append("ended", **end)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    write_run(folder, "gpt-small", 0.0)
    write_run(folder, "gpt-large", 1.0, state="succeeded")
    write_run(folder, "gpt-bad", 2.0)
    journal(folder, "gpt-bad", state="failed", error=f"rank 1 was lost {HTML}\nand more")
    journal(folder, "of-earlier-version", state="stopped", error="")
    (folder / "no-job").mkdir()
    (folder / "gpt-torn").mkdir()
    (folder / "gpt-torn" / "snapshot.json").write_text('{"format": 2')
    return folder


@pytest.fixture
def url(runs: Path) -> Iterator[str]:
    with closing(JobsPage(runs, "127.0.0.1", 0, lambda: LOST_AT_S + 300)) as page:
        yield page.url


def read(url: str) -> Any:
    with urlopen(url, timeout=10) as response:
        return json.loads(response.read())


def test_index_has_running_and_ended_jobs_newest_first(runs: Path, url: str) -> None:
    torn, *rows = read(url + "jobs.json")["jobs"]
    assert (torn["name"], torn["state"]) == ("gpt-torn", "unreadable")
    assert torn["error"].startswith("snapshot.json is not JSON: ")
    assert [row["name"] for row in rows] == [
        *("gpt-bad", "gpt-large", "gpt-small", "of-earlier-version")
    ]
    states = [(row["state"], row["has_curves"]) for row in rows]
    assert states == [("failed", True), ("succeeded", True), ("running", True), ("stopped", False)]
    assert rows[0]["error"] == f"rank 1 was lost {HTML}"
    assert (rows[2]["step"], rows[2]["goodput"]) == (12_345, pytest.approx(0.9025))
    write_run(runs, "gpt-new", 3.0)
    snapshot = json.loads((runs / "gpt-small/snapshot.json").read_text())
    snapshot["progress"]["step"] = 13_000
    (runs / "gpt-small/snapshot.json").write_text(json.dumps(snapshot))
    after = {row["name"]: row for row in read(url + "jobs.json")["jobs"]}
    assert after["gpt-small"]["step"] == 13_000
    assert "gpt-new" in after
    assert (
        read(url + "jobs/gpt-large/history.json")["curves"] == history("gpt-large", 1.0)["curves"]
    )


@pytest.mark.parametrize(
    "path",
    [
        "jobs/../secret/snapshot.json",
        "jobs/..%2Fsecret/snapshot.json",
        "jobs/gpt-small/job.json",
        "jobs//snapshot.json",
        "jobs/gpt-small/snapshot.json/",
        "metrics",
        "jobs/none/history.json",
    ],
)
def test_nothing_else_is_served(runs: Path, url: str, path: str) -> None:
    (runs.parent / "secret").mkdir()
    (runs.parent / "secret/snapshot.json").write_text("{}")
    with pytest.raises(HTTPError, match="404"):
        urlopen(url + path, timeout=10)
    with pytest.raises(HTTPError, match="405"):
        urlopen(Request(url + "jobs.json", method="POST"), timeout=10)


def test_port_in_use_names_the_option(runs: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"--port: cannot listen on 127\.0\.0\.1"):
        JobsPage(runs, "127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")))


@async_test
async def test_run_writes_its_end(tmp_path: Path):
    """At the end of a job its files have the final state, whatever was being written."""
    harness = Harness(tmp_path, FakeCluster(size=2), workers={"min": 2}, steps=4)
    writer = BackgroundWriter(print)
    RunFiles(harness.plan.output_dir, harness.telemetry, writer).subscribe_to(harness.events)
    await harness.steps(3)
    await harness.finish()
    started_s = time.monotonic()
    assert writer.close(10)
    assert time.monotonic() - started_s < 2  # the interval of the files is not waited for
    snapshot = json.loads((harness.plan.output_dir / "snapshot.json").read_bytes())
    assert (snapshot["state"], snapshot["progress"]["step"]) == ("succeeded", 4)
    curves = json.loads((harness.plan.output_dir / "history.json").read_bytes())["curves"]
    assert [row[0] for row in curves["elapsed_s"]] == [1, 2, 3, 4]


def test_curves_continue_in_adopted_run(tmp_path: Path) -> None:
    """As if one process had seen all steps, up to the mean of the bucket that was open."""
    losses = [3.0 / step if step % 50 else nan for step in range(1, 1601)]
    whole, warnings = open_telemetry(tmp_path), list[str]()
    feed(whole, losses, 1)
    first = open_telemetry(tmp_path)
    feed(first, losses[:1001], 1)
    (tmp_path / "history.json").write_text(json.dumps(first.history()))
    second = open_telemetry(tmp_path)
    restore_curves(tmp_path, second, warnings.append)
    feed(second, losses[900:], 901)  # it goes on from the last checkpoint
    expected, curves = whole.history()["curves"], second.history()["curves"]
    assert warnings == []
    assert curves.keys() == expected.keys()
    for name, rows in curves.items():
        assert len(rows) <= 512
        assert [row[0] for row in rows] == sorted({row[0] for row in rows}), name
        assert sum(row[4] for row in rows if len(row) == 5) >= (31 if name == "loss" else 0)
    assert curves["loss"][:200] == [pytest.approx(row, rel=1e-6) for row in expected["loss"][:200]]
    assert curves["user/accuracy"][-1][0] > 1590
    for content in ("{", '{"curves": {"loss": [[1]]}}', '{"curves": 3}'):
        (tmp_path / "history.json").write_text(content)
        restore_curves(tmp_path, second, warnings.append)
    assert len(warnings) == 3
    assert "history.json cannot be read" in warnings[0]
    assert second.history()["curves"] == curves


def open_telemetry(folder: Path) -> Telemetry:
    return Telemetry(plan(folder), VirtualClock(), NO_FILES, lambda: START_S)


def feed(telemetry: Telemetry, losses: list[float], first: int) -> None:
    for step, loss in enumerate(losses, start=first):
        telemetry.on_event(StepRecord(step, 2, 1, loss, 0.0, 0.5, {"accuracy": 0.5}))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_list_and_comparison(tab: Browser, url: str, size: str, dark: bool) -> None:
    tab.set_viewport(*SIZES[size], dark)
    tab.open("about:blank")  # the page of the last test still polls its closed server
    tab.wait_for("location.href == 'about:blank'")
    tab.errors.clear()
    tab.open(url)
    tab.wait_for(f"{TEXT}.includes('of-earlier-version')")
    text = tab.evaluate(TEXT)
    for part in ("gpt-large", "succeeded", "12,345 of 20,000", "90.3 %", "no news for 5 min", HTML):
        assert part in text, part
    check_layout(tab, SIZES[size][0])
    for name in ("gpt-small", "gpt-large"):
        tab.evaluate(f"document.querySelector('[aria-label=\"Select {name}\"]').click()")
    tab.evaluate("document.getElementById('compare').click()")
    tab.wait_for("document.querySelectorAll('#chart-loss path.curve').length == 2")
    assert tab.evaluate("location.hash") == "#/compare/gpt-small,gpt-large"
    assert tab.evaluate("document.querySelectorAll('#jobs tbody tr').length") == 2
    tab.evaluate("moveCursor({ axis: 'step', at: 6000 })")
    legend = (
        "[...document.querySelectorAll('#chart-loss .legend li')].map((item) => item.innerText)"
    )
    values = [f"{history('', shift)['curves']['loss'][100][1]:.4g}" for shift in (0.0, 1.0)]
    shown = [item.split() for item in tab.evaluate(legend)]
    assert shown == [["gpt-small", values[0]], ["gpt-large", values[1]]]
    check_layout(tab, SIZES[size][0])
    tab.evaluate("document.querySelector('#jobs a').click()")  # the newest one
    tab.wait_for(f"{TEXT}.includes('World size and faults') && histories.length")
    assert tab.evaluate("document.getElementById('job').textContent") == "gpt-large"
    assert tab.evaluate("document.querySelectorAll('#chart-loss path.curve').length") == 1
    tab.evaluate("document.getElementById('all-jobs').click()")
    tab.wait_for(f"{TEXT}.includes('of-earlier-version')")
    assert tab.errors == []


def test_job_without_files_is_named(tab: Browser, url: str) -> None:
    tab.open(url + "#/job/of-earlier-version")
    tab.wait_for(f"{TEXT}.includes('there is no jobs/of-earlier-version/snapshot.json')")


def check_layout(tab: Browser, width: int) -> None:
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(OVERFLOWING) == []
    assert tab.evaluate(LOW_CONTRAST) == []
