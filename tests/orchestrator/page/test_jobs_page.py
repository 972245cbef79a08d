"""`rayzero page`: the jobs of a folder, what they write there, and how a browser compares them."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from contextlib import closing
from io import StringIO
from math import nan
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import RunEnded
from rayzero.orchestrator.metrics.jobs_page import JobsPage
from rayzero.orchestrator.metrics.telemetry import HISTORY_INTERVAL_S, RunFiles, Telemetry
from rayzero.orchestrator.metrics.trackers import write_json_lines
from rayzero.orchestrator.progress import StepRecord
from tests.orchestrator.fake_cluster import FakeCluster
from tests.orchestrator.page.browser import SIZES, TEXT, Browser, check_layout
from tests.orchestrator.page.sample import HTML, START_S, history, sample
from tests.orchestrator.support import (
    NO_FILES,
    Harness,
    VirtualClock,
    begun,
    plan,
    write_journal,
)

LOST_AT_S = START_S + 4000.0


def write_run(folder: Path, name: str, shift: float = 0.0, **changes: Any) -> None:
    (folder / name).mkdir()
    snapshot = sample() | {"job": name, "began_s": START_S + 100 * shift} | changes
    (folder / name / "snapshot.json").write_text(json.dumps(snapshot))
    (folder / name / "history.json").write_text(json.dumps(history(name, shift)))


def journal(folder: Path, name: str, lr: float = 1e-3, **end: str) -> None:
    """A run whose journal alone is there, or beside its other files."""
    (folder / name).mkdir(exist_ok=True)
    engine = {"optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95]}}}
    spec = {"name": name, "steps": 50, "workers": {"min": 1, "max": 1}, "engine": engine}
    write_journal(folder / name, begun(spec), *([RunEnded(**end)] if end else []), at_s=START_S)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    write_run(folder, "gpt-small", 0.0)
    write_run(folder, "gpt-large", 1.0, state="succeeded")
    write_run(folder, "gpt-bad", 2.0)
    journal(folder, "gpt-small", 3e-4)
    journal(folder, "gpt-large", 6e-4, state="succeeded", error="")
    journal(folder, "gpt-bad", state="failed", error=f"rank 1 was lost {HTML}\nand more")
    journal(folder, "of-earlier-version", state="stopped", error="")
    (folder / "no-job").mkdir()
    (folder / "gpt-torn").mkdir()
    (folder / "gpt-torn" / "snapshot.json").write_text('{"format": 2')
    return folder


@pytest.fixture
def url(runs: Path) -> Iterator[str]:
    with closing(JobsPage(str(runs), "127.0.0.1", 0, lambda: LOST_AT_S + 300)) as page:
        yield page.url


def read(url: str) -> Any:
    with urlopen(url, timeout=10) as response:
        return json.loads(response.read())


def test_index_has_running_and_ended_jobs_newest_first(runs: Path, url: str) -> None:
    torn, *rows = read(url + "jobs.json")["jobs"]
    assert (torn["name"], torn["state"]) == ("gpt-torn", "unreadable")
    assert torn["error"].startswith("snapshot.json is not JSON: ")
    assert [row["name"] for row in rows] == (
        "gpt-bad gpt-large gpt-small of-earlier-version"
    ).split()
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
        "jobs/gpt-torn/steps.csv",
        "jobs/../secret/steps.csv",
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
        JobsPage(str(runs), "127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")))


async def test_run_writes_its_end(tmp_path: Path):
    """At the end of a job its files have the final state, whatever was being written."""
    harness = Harness(tmp_path, FakeCluster(2), workers={"min": 2}, steps=4)
    writer = BackgroundWriter(print)
    RunFiles(harness.plan, harness.telemetry, writer, NO_FILES).subscribe_to(harness.events)
    await harness.steps(3)
    await harness.finish()
    started_s = time.monotonic()
    assert writer.close(60)
    assert time.monotonic() - started_s < 0.75 * HISTORY_INTERVAL_S, "not waited for"
    snapshot = json.loads((harness.plan.output_dir / "snapshot.json").read_bytes())
    assert (snapshot["state"], snapshot["progress"]["step"]) == ("succeeded", 4)
    curves = json.loads((harness.plan.output_dir / "history.json").read_bytes())["curves"]
    assert [row[0] for row in curves["elapsed_s"]] == [1, 2, 3, 4]


def test_curves_continue_in_adopted_run(tmp_path: Path) -> None:
    """As if one process had seen all steps, up to the mean of the bucket that was open."""
    losses = [3.0 / step if step % 50 else nan for step in range(1, 1601)]
    (whole, events), warnings = open_telemetry(tmp_path), list[str]()
    feed(events, losses, 1)
    first, events = open_telemetry(tmp_path)
    feed(events, losses[:1001], 1)
    (tmp_path / "history.json").write_text(json.dumps(first.history()))
    second, events = open_telemetry(tmp_path)
    second.restore_curves(str(tmp_path), warnings.append)
    feed(events, losses[900:], 901)  # it goes on from the last checkpoint
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
        second.restore_curves(str(tmp_path), warnings.append)
    assert len(warnings) == 3
    assert "history.json cannot be read" in warnings[0]
    assert second.history()["curves"] == curves


def read_csv(url: str) -> list[dict[str, str]]:
    with urlopen(url, timeout=10) as response:
        assert response.headers["Content-Type"] == "text/csv; charset=utf-8"
        return list(csv.DictReader(StringIO(response.read().decode(), newline="")))


@pytest.mark.parametrize("steps", [200, 1500])
def test_csv_of_curves_equals_step_file(runs: Path, url: str, steps: int) -> None:
    """The oracle is metrics.jsonl: every step of a short run, means and extremes of a long one."""
    folder = runs / "gpt-large"
    job_plan, records = plan(folder, metrics={"port": 0}), []
    events = EventBus(unix=lambda: START_S)
    telemetry = Telemetry(job_plan, VirtualClock(), NO_FILES, events, lambda: START_S)
    for step in range(1, steps + 1):
        loss = nan if step == 7 else 3 / step
        gauges = {"lr": 1e-3 * step, "step_samples": 32.0, 'a,b"c': step % 7}
        records.append(StepRecord(step, 2, 1, loss, 0.0, 0.5 + step % 3, gauges))
        events.emit(records[-1])
    write_json_lines(folder / "metrics.jsonl", records)
    (folder / "history.json").write_text(json.dumps(telemetry.history()))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    written = {line["step"]: line for line in map(json.loads, lines)}
    rows = read_csv(url + "jobs/gpt-large/steps.csv")
    assert read_csv(f"{telemetry.url}/steps.csv") == rows
    telemetry.close()
    names = {"loss": "loss", "lr": "lr", "step_s": "step_s", 'user/a,b"c': 'a,b"c'}
    for column, field in names.items():
        told = [row for row in rows if row[column]]
        ends = [int(row["step"]) for row in told[1:]] + [steps + 1]
        for row, end in zip(told, ends, strict=True):
            part = [written[step][field] for step in range(int(row["step"]), end)]
            finite = [value for value in part if value is not None]
            mean = sum(finite) / len(finite) if finite else nan
            assert float(row[column]) == pytest.approx(mean, rel=1e-6, nan_ok=True)
            if steps > 256 and finite:
                assert float(row[f"{column}_min"]) == pytest.approx(min(finite), rel=1e-6)
                assert float(row[f"{column}_max"]) == pytest.approx(max(finite), rel=1e-6)
    speeds = [32 / written[step]["step_s"] for step in range(1, 4)]
    if steps < 256:
        assert len(rows) == steps
        assert not any(name.endswith(("_min", "_max")) for name in rows[0])
        assert [float(row["samples_per_s"]) for row in rows[:3]] == pytest.approx(speeds, rel=1e-6)


def test_csv_of_jobs_has_what_differs(runs: Path, url: str) -> None:
    rows = {row["name"]: row for row in read_csv(url + "jobs.csv")}
    snapshot = json.loads((runs / "gpt-large/snapshot.json").read_text())
    large = rows["gpt-large"]
    assert float(large["loss"]) == snapshot["training"]["loss"]
    assert float(large["samples_per_s"]) == snapshot["progress"]["samples_per_s"]
    assert float(large["gpu_utilization"]) == snapshot["usage"]["gpu_utilization"]
    assert rows["of-earlier-version"]["loss"] == ""
    assert rows["gpt-bad"]["error"] == f"rank 1 was lost {HTML}"
    torn = rows.pop("gpt-torn")
    assert (torn["state"], torn["engine.optimizer.params.lr"]) == ("unreadable", "")
    rates = {name: float(row["engine.optimizer.params.lr"]) for name, row in rows.items()}
    assert rates == {
        "gpt-small": 3e-4,
        "gpt-large": 6e-4,
        "gpt-bad": 1e-3,
        "of-earlier-version": 1e-3,
    }
    assert not any(key.startswith(("workers", "engine.optimizer.type")) for key in large)


def open_telemetry(folder: Path) -> tuple[Telemetry, EventBus]:
    events = EventBus(unix=lambda: START_S)
    return Telemetry(plan(folder), VirtualClock(), NO_FILES, events, lambda: START_S), events


def feed(events: EventBus, losses: list[float], first: int) -> None:
    for step, loss in enumerate(losses, start=first):
        events.emit(StepRecord(step, 2, 1, loss, 0.0, 0.5, {"accuracy": 0.5}))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_list_and_comparison(tab: Browser, url: str, size: str, dark: bool) -> None:
    open_list(tab, url, size, dark)
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


SHOWN_NAMES = "[...document.querySelectorAll('#jobs tbody a')].map((link) => link.textContent)"
HEADS = "[...document.querySelectorAll('#jobs thead th')].map((head) => head.textContent)"


def open_list(tab: Browser, url: str, size: str = "desktop", dark: bool = False) -> None:
    tab.set_viewport(*SIZES[size], dark)
    tab.open(url)
    tab.wait_for(f"{TEXT}.includes('of-earlier-version')")


def test_list_is_sorted_by_mouse_and_keys(tab: Browser, url: str) -> None:
    open_list(tab, url)
    newest_first = ["gpt-torn", "gpt-bad", "gpt-large", "gpt-small", "of-earlier-version"]
    assert tab.evaluate(SHOWN_NAMES) == newest_first
    head = (
        "[...document.querySelectorAll('#jobs th button')].find((b) => b.textContent == '{}')"
    ).format
    tab.evaluate(f"{head('optimizer.params.lr')}.click()")
    by_rate = ["gpt-small", "gpt-large", "gpt-bad", "of-earlier-version", "gpt-torn"]
    assert tab.evaluate(SHOWN_NAMES) == by_rate
    tab.evaluate(f"{head('Samples/s')}.focus()")
    for direction in ("ascending", "descending", "none"):
        space = {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32}
        tab.call("Input.dispatchKeyEvent", type="keyDown", text=" ", **space)
        tab.call("Input.dispatchKeyEvent", type="keyUp", **space)
        focused = "document.activeElement.textContent"
        assert tab.evaluate(focused) == "Samples/s"  # though the table was made anew
        sorted_by = "document.activeElement.parentElement.getAttribute('aria-sort')"
        assert tab.evaluate(sorted_by) == direction
        without_value = {"gpt-torn", "of-earlier-version"}
        assert (set(tab.evaluate(SHOWN_NAMES)[-2:]) == without_value) == (direction != "none")
    assert tab.evaluate(SHOWN_NAMES) == newest_first
    assert tab.errors == []


def test_list_is_filtered_and_shows_what_differs(tab: Browser, url: str) -> None:
    open_list(tab, url)

    def filter_by(text: str) -> list[str]:
        tab.evaluate(
            "(() => { const input = document.getElementById('filter');"
            f" input.value = {json.dumps(text)}; input.dispatchEvent(new Event('input')); }})()"
        )
        return list(tab.evaluate(SHOWN_NAMES))

    assert "optimizer.params.lr" in tab.evaluate(HEADS)
    assert not any("betas" in head or "Tokens" in head for head in tab.evaluate(HEADS)[:5])
    assert filter_by("LR=0.0003") == ["gpt-small"]
    assert "optimizer.params.lr" not in tab.evaluate(HEADS)  # of one job nothing differs
    assert filter_by("gpt succeeded") == ["gpt-large"]
    assert filter_by("nothing like it") == []
    assert "None of 5 jobs matches the filter." in tab.evaluate(TEXT)
    assert filter_by("earlier") == ["of-earlier-version"]
    assert "Samples/s" not in tab.evaluate(HEADS)  # no job shown has a value
    assert len(filter_by("")) == 5
    reds = "[...document.querySelectorAll('#jobs .error')].map((one) => one.textContent)"
    unreadable, lost = tab.evaluate(reds)
    assert unreadable.startswith("snapshot.json is not JSON: ")
    assert lost == f"rank 1 was lost {HTML}"
    assert tab.errors == []
    tab.open(url + "#/job/of-earlier-version")
    tab.wait_for(f"{TEXT}.includes('there is no jobs/of-earlier-version/snapshot.json')")
