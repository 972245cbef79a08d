"""Seats that wait are a demand that Ray's autoscaler meets, and nodes that are left go."""

from __future__ import annotations

import pytest

from tests.integration.namespaces import alone

pytestmark = pytest.mark.slow


def test_nodes_come_for_the_seats_that_wait_and_go_when_they_are_left():
    seen = alone("tests.integration.autoscaled", "grow_and_shrink")
    assert 2 <= seen["at_first"] <= 6
    assert seen["nodes"] == 3
    assert seen["left"] == 1
