"""The doctor command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.integration.conftest import CPUS, Head

pytestmark = pytest.mark.slow


def test_doctor_command_with_cluster(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real cluster, all-reduce and disk."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = subprocess.run(
        [sys.executable, "-m", "rayzero", "doctor", "--json", "--address", head.address],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    report = json.loads(result.stdout)
    levels = {finding["name"]: finding["level"] for finding in report["findings"]}
    assert result.returncode == 0, result.stdout + result.stderr
    assert [levels[name] for name in ("torch", "gloo", "cluster", "checkpoints")] == ["ok"] * 4
    (cluster_finding,) = [f for f in report["findings"] if f["name"] == "cluster"]
    assert cluster_finding["seen"].startswith(f"1 nodes, {CPUS} CPUs")
