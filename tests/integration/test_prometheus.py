"""A real Prometheus scrapes a real job that loses a worker.

Every dashboard panel has data, every alert rule evaluates, and the expected alert fires.
"""

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
import yaml

from rayzero.orchestrator.job_events import Checkpointed, MetricsServed, Repaired
from rayzero.orchestrator.page import render_page
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from rayzero.orchestrator.top.follow import endpoint_source
from tests.deploy.prometheus import (
    ALERTS,
    PrometheusServer,
    find_program,
    run_prometheus,
    substitute_variables,
    wait_for,
)
from tests.integration.conftest import Head
from tests.integration.scraping import ABSENT
from tests.integration.steady_job import steady_job
from tests.orchestrator.support import EventLog
from tools.dashboard.grafana import list_expressions

pytestmark = pytest.mark.slow
TIMEOUT_S = 200.0


@pytest.mark.usefixtures("connected")
def test_every_panel_and_alert_has_data(head: Head, tmp_path: Path) -> None:
    find_program("prometheus")  # skips the test before it starts a job
    scrape_a_job(tmp_path, head.address)


def scrape_a_job(folder: Path, address: str) -> None:
    event_log = EventLog()
    job = steady_job(
        folder,
        "monitored",
        workers=Workers(min=1, max=2),
        checkpoint={"path": str(folder), "every_steps": 50},
        recovery={"max_faults": 1},
        metrics={"port": 0},
        faults=["kill(rank=1, step=150)"],
    )
    handle = job.submit(observer=event_log)
    try:
        wait_for(lambda: event_log.of(MetricsServed), TIMEOUT_S)
        (serving,) = event_log.of(MetricsServed)
        assert read(serving.url) == render_page()
        assert endpoint_source(serving.url)()["job"] == "monitored"
        command = [sys.executable, "-m", "rayzero", "top", "monitored", "--once", "--json"]
        top = subprocess.run(
            [*command, "--address", address],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        assert json.loads(top.stdout)["job"] == "monitored"
        with run_prometheus(serving.url.removeprefix("http://"), folder) as server:
            start_s = time.time()
            wait_for(lambda: event_log.of(Repaired) and event_log.of(Checkpointed), TIMEOUT_S)
            repair_step = event_log.of(StepRecord)[-1].step
            check_server(server, start_s)
            wait_for(lambda: event_log.of(StepRecord)[-1].step > repair_step, TIMEOUT_S)
            handle.stop()
            assert handle.wait(120)
            # the job waits for this scrape before it exits
            query = 'max_over_time(rayzero_state{state="stopped"}[1m])'
            wait_for(lambda: values(server.get("query", query=query)) == ["1"], 30)
    finally:
        handle.end()


def values(response: Any) -> list[str]:
    return [sample["value"][1] for sample in response["result"]]


def read(url: str) -> str:
    with urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def check_server(server: PrometheusServer, start_s: float) -> None:
    panels = dict(list_expressions())
    expected = {name for name, expr in panels.items() if not any(m in expr for m in ABSENT)}

    def panels_with_data() -> set[str]:
        exprs = {
            name: substitute_variables(expr, "monitored", "10s") for name, expr in panels.items()
        }
        return {
            name for name, expr in exprs.items() if server.query_range(expr, start_s, time.time())
        }

    with suppress(AssertionError):  # the assertion below shows what is missing
        wait_for(lambda: panels_with_data() >= expected, TIMEOUT_S)
    assert panels_with_data() == expected
    for rule in all_rules(server):
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule["name"]
    with suppress(AssertionError):
        wait_for(lambda: not unmatched_selectors(server, start_s, time.time()), TIMEOUT_S)
    assert unmatched_selectors(server, start_s, time.time()) == []
    wait_for(lambda: any(alert["state"] == "firing" for alert in alerts(server)), TIMEOUT_S)
    firing = {(alert["labels"]["alertname"], alert["state"]) for alert in alerts(server)}
    assert firing == {("RayzeroFaultBudgetNearlySpent", "firing")}


def alerts(server: PrometheusServer) -> list[dict[str, Any]]:
    return list(server.get("alerts")["alerts"])


def all_rules(server: PrometheusServer) -> list[dict[str, Any]]:
    wait_for(lambda: all(rule["health"] != "unknown" for rule in rules(server)), TIMEOUT_S)
    return rules(server)


def rules(server: PrometheusServer) -> list[dict[str, Any]]:
    return [rule for group in server.get("rules")["groups"] for rule in group["rules"]]


def unmatched_selectors(server: PrometheusServer, start: float, stop: float) -> list[str]:
    """Selectors in the alert rules that match no series of the job."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    text = " ".join(rule["expr"] for group in groups for rule in group["rules"])
    selectors = set(re.findall(r"rayzero_\w+(?:\{[^}]*\})?", text))
    return [s for s in sorted(selectors) if not server.query_range(s, start, stop)]
