"""The notice of a pod's end reaches the controller's ears: Ray drains the pod's own node."""

from __future__ import annotations

import pytest

from tests.integration.namespaces import run_in_namespaces


@pytest.mark.slow
def test_a_pod_that_is_ended_tells_ray() -> None:
    found = run_in_namespaces("tests.deploy.notice", "notice")
    assert found["right"]
    assert found["holds"], "the pod must live while its work moves away"
    assert found["told_s"] < 25, "most of the notice is for the work"
