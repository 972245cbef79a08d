"""Drain, network cut and partition of a host: scenarios that share one cluster."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.namespaces import run_in_namespaces

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_in_namespaces("tests.integration.two_hosts")


def test_pre_stop_hook_drains_node(results: dict[str, Any]) -> None:
    result = results["drain"]
    assert result["drained_own_node"]
    assert result["hook_running"], "the pod must stay alive while its work moves away"
    assert result["drain_s"] < 25, "most of the grace period must remain for moving the work"


def test_network_cut_is_detected_and_reservation_moves(results: dict[str, Any]) -> None:
    result = results["cut_link"]
    assert result["results_match"]
    assert result["detection_s"] < 60, "less than with Ray's default settings"
    assert result["replacement_is_local"]
    assert result["remote_exited"], "the worker behind the cut exited when the link came back"


def test_job_survives_partitioned_host(results: dict[str, Any]) -> None:
    result = results["partition"]
    assert result["fired"] == ["partition"]
    assert result["world_sizes"] == [4, 2]
    assert result["repair_s"] < 150
    assert result["step"] > 0, "the state came from memory"
