"""Runs `prometheus` and `promtool` where they are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from tests.house.source import ROOT
from tests.support.ports import free_ports

ALERTS = ROOT / "helm/rayzero/files/alerts.yaml"


def installed_program(name: str) -> str | None:
    """Path of `prometheus` or `promtool`; None if it is not installed."""
    return os.environ.get(f"RAYZERO_{name.upper()}") or shutil.which(name)


def find_program(name: str) -> str:
    """As `installed_program`; skips the test if it is not."""
    if not (path := installed_program(name)):
        pytest.skip(f"{name} is neither on PATH nor named by RAYZERO_{name.upper()}")
    return path


def check_alert_fires(alert: str, series: dict[str, str], folder: Path) -> None:
    """The alert rules evaluate to one alert of that name after an hour of these samples, one a
    minute, in promtool's notation."""
    expr = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    expected = [{"labels": "{}", "value": 1}]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": expr, "eval_time": "1h", "exp_samples": expected}],
    }
    document = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}
    (folder / f"{alert}.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    promtool("test", "rules", f"{alert}.yaml", cwd=folder)


def promtool(*arguments: str, cwd: Path) -> str:
    """Run promtool and return its output; fails the test if promtool fails."""
    command = [find_program("promtool"), *arguments]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def recording_rules(expressions: dict[str, str]) -> str:
    """A rules file with a recording rule for each expression, so that promtool parses them."""
    rows = [
        {"record": f"check:{number}", "expr": expr, "labels": {"of": name}}
        for number, (name, expr) in enumerate(expressions.items())
    ]
    return yaml.safe_dump({"groups": [{"name": "check", "rules": rows}]}, sort_keys=False)


def substitute_variables(expr: str, job: str = "gpt", interval: str = "1m") -> str:
    """A dashboard expression with values for its variables."""
    for variable, value in {
        "$__rate_interval": interval,
        "$__interval": interval,
        "$job": job,
        "$rank": ".*",
    }.items():
        expr = expr.replace(variable, value)
    return expr


class PrometheusServer:
    """Client of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **parameters: str | float) -> Any:
        """The data of an API response."""
        query = urlencode(parameters)
        with urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=300) as response:
            return json.loads(response.read())["data"]

    def query_range(self, expr: str, start: float, stop: float) -> list[Any]:
        """The series that an expression has within a time range."""
        data = self.get("query_range", query=expr, start=start, end=stop, step=1)
        return list(data["result"])


@contextmanager
def run_prometheus(target: str, folder: Path) -> Iterator[PrometheusServer]:
    """Run a Prometheus that scrapes host:port each second and evaluates the alerts."""
    (port,) = free_ports(1)
    listen = f"127.0.0.1:{port}"
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {
                "job_name": "rayzero",
                "honor_labels": True,
                "static_configs": [{"targets": [target]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    promtool("check", "config", "prometheus.yml", cwd=folder)
    command = [
        find_program("prometheus"),
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={listen}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        wait_for(lambda: is_ready(f"http://{listen}"))
        yield PrometheusServer(f"http://{listen}")
    finally:
        process.kill()
        process.wait(20)


def is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/-/ready", timeout=5):
            return True
    except OSError:
        return False


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not true within {timeout_s} s"
        time.sleep(0.2)
