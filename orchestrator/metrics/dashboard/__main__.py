"""Writes the dashboard to a file: `python -m rayzero.orchestrator.metrics.dashboard [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from rayzero.orchestrator.metrics.dashboard.grafana import document

CHART = Path("helm/rayzero/files/dashboard.json")
"""In the root of the source tree."""

if __name__ == "__main__":
    (Path(sys.argv[1]) if sys.argv[1:] else CHART).write_text(document(), encoding="utf-8")
