"""Ray's autoscaler adds nodes for pending reservations and removes idle nodes."""

from __future__ import annotations

import pytest

from tests.integration.namespaces import run_in_namespaces

pytestmark = pytest.mark.slow


def test_autoscaler_adds_nodes_for_pending_reservations_and_removes_idle_nodes():
    result = run_in_namespaces("tests.integration.autoscaling")
    assert 2 <= result["initial_workers"] <= 4
    assert result["nodes"] == 2
    assert result["remaining_nodes"] == 1
