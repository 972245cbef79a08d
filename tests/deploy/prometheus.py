"""Prometheus' own programs, where a machine has them."""

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

from benchmarks.ports import free_ports
from tests.house.source import ROOT

ALERTS = ROOT / "helm/rayzero/files/alerts.yaml"


def program(name: str) -> str:
    """Where `prometheus` or `promtool` is; skips the test where it is not."""
    variable = f"RAYZERO_{name.upper()}"
    found = os.environ.get(variable) or shutil.which(name)
    if not found:
        pytest.skip(f"{name} is neither on PATH nor named by {variable}")
    return found


def promtool(*arguments: str, cwd: Path) -> str:
    """What it says; fails the test if it is not content."""
    command = [program("promtool"), *arguments]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def rules(expressions: dict[str, str]) -> str:
    """Expressions as the text of a file of recording rules, so that promtool parses each."""
    rows = [
        {"record": f"check:{number}", "expr": expr, "labels": {"of": name}}
        for number, (name, expr) in enumerate(expressions.items())
    ]
    return yaml.safe_dump({"groups": [{"name": "check", "rules": rows}]}, sort_keys=False)


def filled(expr: str, job: str = "gpt", span: str = "1m") -> str:
    """A dashboard's expression with its variables replaced."""
    for variable, value in {
        "$__rate_interval": span,
        "$__interval": span,
        "$job": job,
        "$rank": ".*",
    }.items():
        expr = expr.replace(variable, value)
    return expr


class Server:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str | float) -> Any:
        """What its API answers."""
        query = urlencode(parameters)
        with urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=300) as answer:
            return json.loads(answer.read())["data"]

    def curve(self, expr: str, start: float, stop: float) -> list[Any]:
        """The series that an expression gives anywhere in that time."""
        found: list[Any] = self.ask("query_range", query=expr, start=start, end=stop, step=1)[
            "result"
        ]
        return found


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Server]:
    """A Prometheus that scrapes host:port each second, with the alerts; killed at the end."""
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
        program("prometheus"),
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={listen}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        wait_for(lambda: is_ready(f"http://{listen}"))
        yield Server(f"http://{listen}")
    finally:
        process.kill()
        process.wait(20)


def is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/-/ready", timeout=5):
            return True
    except OSError:
        return False


def wait_for(so: Callable[[], object], limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while not so():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.2)
