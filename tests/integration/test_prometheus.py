"""A real Prometheus scrapes a real job that loses a worker: every panel has something to show,
every alert can be judged, and the one that should fire does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import ray
import yaml

from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job_events import Checkpointed, MetricsServed, Repaired
from rayzero.orchestrator.page import render_page
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from rayzero.orchestrator.top.follow import endpoint_source
from tests.deploy.prometheus import ALERTS, Server, filled, program, scraping, wait_for
from tests.integration.conftest import Head
from tests.integration.jobs import steady
from tests.orchestrator.support import EventLog
from tools.dashboard.grafana import list_expressions

pytestmark = pytest.mark.slow
# Of a job on CPUs: nobody knows a peak.
ABSENT = {
    "rayzero_model_flops_utilization_ratio",
    "rayzero_device_peak_memory_bytes",
}
WAIT_S = 200.0


def test_every_panel_and_alert_has_data(head: Head, tmp_path: Path) -> None:
    program("prometheus")  # before a job is started in vain
    ray.init(address=head.address, log_to_driver=False)
    try:
        scrape_a_job(tmp_path, head.address)
    finally:
        ray.shutdown()


def scrape_a_job(folder: Path, address: str) -> None:
    notebook = EventLog()
    job = Job(
        name="watched",
        entrypoint=steady.train,
        engine=steady.ENGINE,
        workers=Workers(min=1, max=2),
        steps=100_000,
        checkpoint={"path": str(folder), "every_steps": 50},
        recovery={"max_faults": 1},
        metrics={"port": 0},
        faults=["kill(rank=1, step=150)"],
    )
    handle = job.submit(observer=notebook)
    try:
        wait_for(lambda: notebook.of(MetricsServed), WAIT_S)
        (serving,) = notebook.of(MetricsServed)
        assert read(serving.url) == render_page()
        assert endpoint_source(serving.url)()["job"] == "watched"
        command = [sys.executable, "-m", "rayzero", "top", "watched", "--once", "--json"]
        shown = subprocess.run(
            [*command, "--address", address],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        assert json.loads(shown.stdout)["job"] == "watched"
        with scraping(serving.url.removeprefix("http://"), folder) as server:
            began = time.time()
            wait_for(lambda: notebook.of(Repaired) and notebook.of(Checkpointed), WAIT_S)
            repaired = notebook.of(StepRecord)[-1].step
            check(server, began)
            wait_for(lambda: notebook.of(StepRecord)[-1].step > repaired, WAIT_S)
            handle.stop()
            assert handle.wait(120)
            last = 'max_over_time(rayzero_state{state="stopped"}[1m])'  # it waits for this reader
            wait_for(lambda: values(server.ask("query", query=last)) == ["1"], 30)
    finally:
        handle.end()


def values(answer: Any) -> list[str]:
    return [one["value"][1] for one in answer["result"]]


def read(url: str) -> str:
    with urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def check(server: Server, began: float) -> None:
    panels = dict(list_expressions())
    known = {name for name, expr in panels.items() if not any(one in expr for one in ABSENT)}

    def shown() -> set[str]:
        exprs = {name: filled(expr, "watched", "10s") for name, expr in panels.items()}
        return {name for name, expr in exprs.items() if server.curve(expr, began, time.time())}

    with suppress(AssertionError):  # the one below says what is missing
        wait_for(lambda: shown() >= known, WAIT_S)
    assert shown() == known
    for rule in all_rules(server):
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule["name"]
    with suppress(AssertionError):
        wait_for(lambda: not unseen(server, began, time.time()), WAIT_S)
    assert unseen(server, began, time.time()) == []
    wait_for(lambda: any(one["state"] == "firing" for one in alerts(server)), WAIT_S)
    firing = {(one["labels"]["alertname"], one["state"]) for one in alerts(server)}
    assert firing == {("RayzeroFaultBudgetNearlySpent", "firing")}


def alerts(server: Server) -> list[dict[str, Any]]:
    return list(server.ask("alerts")["alerts"])


def all_rules(server: Server) -> list[dict[str, Any]]:
    wait_for(lambda: all(rule["health"] != "unknown" for rule in rules(server)), WAIT_S)
    return rules(server)


def rules(server: Server) -> list[dict[str, Any]]:
    return [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]


def unseen(server: Server, start: float, stop: float) -> list[str]:
    """Selectors of the alerts that match no series of the job."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    text = " ".join(rule["expr"] for group in groups for rule in group["rules"])
    selectors = set(re.findall(r"rayzero_\w+(?:\{[^}]*\})?", text))
    return [one for one in sorted(selectors) if not server.curve(one, start, stop)]
