"""A controller that continues a run uses the vaults that have outlived the one before."""

from __future__ import annotations

import time
from pathlib import Path

from rayzero.orchestrator.job_events import RunAdopted
from tests.orchestrator.fake_cluster import FakeCluster
from tests.orchestrator.support import Harness, reread, settle


async def test_steps_that_no_controller_has_seen_are_not_made_again(folder: Path):
    first = Harness(folder, FakeCluster("ab"), unix=time.time)
    await first.steps(2)
    seen = reread(first.events.facts)
    await first.steps(3)  # the journal has none of these
    vaults = dict(first.cluster.vaults.by_node)
    first.run.cancel()
    await settle()
    cluster = FakeCluster("a")
    cluster.committed = first.cluster.committed  # its workers must begin with this step
    cluster.vaults.by_node, cluster.vaults.attached = vaults, ("a", "b", "gone")
    second = Harness(folder, cluster, past=seen, workers={"min": 1})
    await second.steps(1)
    (adopted,) = second.log.of(RunAdopted)
    assert adopted.step == 2
    assert second.restored == {5}
    assert second.controller.status().step == 6
