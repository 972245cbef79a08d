"""A Prometheus server that scrapes one job every second, with the alert rules of the chart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from tests.support.ports import free_ports
from tests.support.token_head import ROOT, wait_for

ALERTS = ROOT / "helm/rayzero/files/alerts.yaml"
START_TIMEOUT_S = 60.0


def find_prometheus() -> str | None:
    """Path of the Prometheus executable: RAYZERO_PROMETHEUS, or from PATH."""
    return os.environ.get("RAYZERO_PROMETHEUS") or shutil.which("prometheus")


class Scraper:
    """Client of the Prometheus HTTP API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def value(self, query: str) -> float | None:
        """Current value of the first series of an expression; None if it has no series."""
        series = self._get("query", query=query)["result"]
        return float(series[0]["value"][1]) if series else None

    def unhealthy(self) -> list[str]:
        """Names of rules that failed or were not evaluated yet."""
        groups = self._get("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return [rule["name"] for rule in rules if rule["health"] != "ok"]

    def firing(self) -> set[str]:
        alerts = self._get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def is_ready(self) -> bool:
        try:
            with urlopen(f"{self._url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urlencode(parameters)}"
        with urlopen(url, timeout=20) as response:
            return json.loads(response.read())["data"]


@contextmanager
def scraping(port: int, folder: Path) -> Iterator[Scraper | None]:
    """Run a server that scrapes 127.0.0.1:port. Yields None if Prometheus is not installed."""
    executable = find_prometheus()
    if executable is None:
        yield None
        return
    (listen,) = free_ports(1)
    target = {"targets": [f"127.0.0.1:{port}"]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": "rayzero", "honor_labels": True, "static_configs": [target]}
        ],
    }
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{listen}"
    command = [executable, "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], cwd=folder, stdout=log, stderr=log
        )
    try:
        scraper = Scraper(f"http://{address}")
        wait_for(scraper.is_ready, START_TIMEOUT_S, "Prometheus")
        yield scraper
    finally:
        process.kill()
        process.wait(20)
