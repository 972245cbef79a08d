"""A real Prometheus scrapes a real job that loses a worker: every panel has something to show,
every alert can be judged, and the one that should fire does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import ray
import yaml

from rayzero.orchestrator.api import Job, Workers
from rayzero.orchestrator.metrics.dashboard.grafana import expressions
from rayzero.orchestrator.notices import Checkpointed, Repaired, Serving
from rayzero.orchestrator.page.assembly import page
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.top.source import served_at
from tests.deploy.prometheus import ALERTS, Server, filled, program, scraping, wait_for
from tests.integration.conftest import Head
from tests.integration.jobs import steady
from tests.orchestrator.support import Notebook

pytestmark = pytest.mark.slow
# Of a job on CPUs: nobody knows a peak.
ABSENT = {
    "rayzero_model_flops_utilization_ratio",
    "rayzero_device_peak_memory_bytes",
}
SPAN_S = 8.0
"""How long it is scraped after the repair; the windows of rates are shorter."""


def test_every_panel_and_alert_has_data(head: Head, tmp_path: Path) -> None:
    program("prometheus")  # before a job is started in vain
    ray.init(address=head.address, log_to_driver=False)
    try:
        scrape_a_job(tmp_path, head.address)
    finally:
        ray.shutdown()


def scrape_a_job(folder: Path, address: str) -> None:
    notebook = Notebook()
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
        wait_for(lambda: notebook.of(Serving))
        (serving,) = notebook.of(Serving)
        assert read(serving.url) == page()
        assert served_at(serving.url)()["job"] == "watched"
        command = [sys.executable, "-m", "rayzero", "top", "watched", "--once", "--json"]
        shown = subprocess.run(
            [*command, "--address", address], capture_output=True, text=True, timeout=90, check=True
        )
        assert json.loads(shown.stdout)["job"] == "watched"
        with scraping(serving.url.removeprefix("http://"), folder) as server:
            began = time.time()
            wait_for(lambda: notebook.of(Repaired) and notebook.of(Checkpointed), 120)
            repaired = notebook.of(StepRecord)[-1].step
            time.sleep(SPAN_S)
            assert notebook.of(StepRecord)[-1].step > repaired
            check(server, began)
            handle.stop()
            assert handle.wait(60)
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
    now = time.time()
    empty = []
    for name, expr in expressions():
        absent = any(one in expr for one in ABSENT)
        found = server.curve(filled(expr, "watched", "5s"), began, now)
        if bool(found) is absent:
            empty.append(name)
    assert empty == []
    for rule in all_rules(server):
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule["name"]
    assert unseen(server, began, now) == []
    wait_for(lambda: server.ask("alerts")["alerts"], 20)
    firing = {(one["labels"]["alertname"], one["state"]) for one in server.ask("alerts")["alerts"]}
    assert firing == {("RayzeroFaultBudgetNearlySpent", "firing")}


def all_rules(server: Server) -> list[dict[str, Any]]:
    wait_for(lambda: all(rule["health"] != "unknown" for rule in rules(server)), 20)
    return rules(server)


def rules(server: Server) -> list[dict[str, Any]]:
    return [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]


def unseen(server: Server, start: float, stop: float) -> list[str]:
    """Selectors of the alerts that match no series of the job."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    text = " ".join(rule["expr"] for group in groups for rule in group["rules"])
    selectors = set(re.findall(r"rayzero_\w+(?:\{[^}]*\})?", text))
    return [one for one in sorted(selectors) if not server.curve(one, start, stop)]
