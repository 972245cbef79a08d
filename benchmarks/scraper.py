"""A real Prometheus that scrapes one job each second, with the chart's alerts."""

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

from benchmarks.ports import free_ports
from benchmarks.token_head import ROOT, wait_for

ALERTS = ROOT / "helm/rayzero/files/alerts.yaml"
READY_S = 60.0


def program() -> str | None:
    """Where `prometheus` is: RAYZERO_PROMETHEUS, or on PATH."""
    return os.environ.get("RAYZERO_PROMETHEUS") or shutil.which("prometheus")


class Scraper:
    def __init__(self, url: str) -> None:
        self._url = url

    def value(self, query: str) -> float | None:
        """Of the first series of an expression now; None where there is none."""
        found = self._asked("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    def unhealthy(self) -> list[str]:
        """Rules that cannot be judged, those not yet judged among them."""
        groups = self._asked("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return [rule["name"] for rule in rules if rule["health"] != "ok"]

    def firing(self) -> set[str]:
        alerts = self._asked("alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def is_ready(self) -> bool:
        try:
            with urlopen(f"{self._url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def _asked(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urlencode(parameters)}"
        with urlopen(url, timeout=20) as answer:
            return json.loads(answer.read())["data"]


@contextmanager
def scraping(port: int, folder: Path) -> Iterator[Scraper | None]:
    """One that scrapes 127.0.0.1:port, killed at the end; None where there is no Prometheus."""
    found = program()
    if found is None:
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
    command = [found, "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], cwd=folder, stdout=log, stderr=log
        )
    try:
        scraper = Scraper(f"http://{address}")
        wait_for(scraper.is_ready, READY_S, "Prometheus")
        yield scraper
    finally:
        process.kill()
        process.wait(20)
