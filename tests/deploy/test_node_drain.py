"""A worker pod's preStop hook drains its Ray node."""

from __future__ import annotations

import pytest

from tests.integration.namespaces import run_in_namespaces


@pytest.mark.slow
def test_pre_stop_hook_drains_node() -> None:
    result = run_in_namespaces("tests.deploy.node_drain", "drain")
    assert result["drained_own_node"]
    assert result["hook_running"], "the pod must stay alive while its work moves away"
    assert result["drain_s"] < 25, "most of the grace period must remain for moving the work"
