"""Which version roles are told of, through repairs and resizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.control.weight_versions import WeightVersions
from rayzero.orchestrator.policies.membership import Selected
from rayzero.orchestrator.policies.recovery import StoredSlot
from rayzero.orchestrator.progress import JobProgress, StepRecord
from rayzero.workers.messages import Mirrored, RankAssignment, StepReport, WorkerInfo
from rayzero.workers.step_rows import combine
from rayzero.workers.vault.records import Restore, SlotInfo, SlotRef
from rayzero.workers.weights.directory import WeightDirectory, WeightVersion


class Job:
    def __init__(self) -> None:
        self.generation = GenerationState()
        self.told: list[WeightDirectory] = []
        members: Any = SimpleNamespace()
        self._members = members
        self.versions = WeightVersions(members, self._on_change)

    def _on_change(self) -> None:
        if (newest := self.versions.newest) is not None:
            self.told.append(newest)

    def begin(self, number: int, nodes: str, restore: Restore | None = None) -> None:
        """A generation with workers 10, 11... on these nodes."""
        workers = tuple(WorkerInfo(10 + rank, node, node, "", 0) for rank, node in enumerate(nodes))
        assignments = {it.index: RankAssignment(it.index - 10, 0, 1, "") for it in workers}
        self.generation = GenerationState(number, Selected(workers), assignments, restore)
        self._members.generation = self.generation
        self.versions.start_generation(self.generation)

    def step(self, step: int, mirrored: int | None, generation: int = 0) -> None:
        """All ranks have finished a step."""
        number, size = generation or self.generation.number, self.generation.world_size
        progress = JobProgress()
        progress.start_generation(number, size)
        gauges = {} if mirrored is None else {"replica_step": float(mirrored)}
        records = [
            progress.add_rows(combine([rank], [StepReport(number, rank, step, gauges=gauges)]))
            for rank in range(size)
        ]
        [record] = filter(None, records)
        assert isinstance(record, StepRecord)
        self.versions.on_step_finished(record)

    @property
    def newest(self) -> WeightVersion | None:
        directory = self.versions.newest
        return None if directory is None else directory.version


def slots(generation: int, step: int, nodes: str) -> tuple[SlotRef, ...]:
    return tuple(SlotRef(generation, rank, step, node) for rank, node in enumerate(nodes))


def test_a_version_is_a_step_that_all_ranks_have_mirrored():
    job = Job()
    job.begin(1, "ab")
    assert job.newest is None
    job.step(1, None)
    assert job.told == []
    for step, mirrored in ((2, 1), (3, 3), (4, 3)):
        job.step(step, mirrored)
    assert [it.slots for it in job.told] == [slots(1, 1, "ab"), slots(1, 3, "ab")]


def test_what_a_job_begins_with_is_one_once_all_ranks_have_mirrored_it():
    job = Job()
    job.begin(1, "aab")
    for rank in (0, 2):
        job.versions.on_mirrored(10 + rank, Mirrored(1, rank, 0))
    job.versions.on_mirrored(99, Mirrored(1, 1, 0))  # no member
    job.versions.on_mirrored(11, Mirrored(0, 1, 0))  # late, of another generation
    assert job.newest is None
    job.versions.on_mirrored(11, Mirrored(1, 1, 0))
    assert job.versions.newest == WeightDirectory(slots(1, 0, "aab"), confirmed_in=1)
    assert job.versions.confirmed == job.versions.newest


def test_a_repair_goes_on_with_the_version_that_it_restores():
    job = Job()
    job.begin(1, "abc")
    job.step(7, 7)
    # Node c is lost; its slot has a replica on node a.
    restored = (*slots(1, 7, "ab"), SlotRef(1, 2, 7, "a"))
    job.begin(2, "ab", Restore(7, restored))
    assert job.newest == WeightVersion(1, 7), "it is the same weights: nothing is read again"
    assert job.told[-1].slots == restored
    job.step(8, 7, generation=1)  # late
    assert job.newest == WeightVersion(1, 7)
    job.step(8, 8)
    assert job.told[-1].slots == slots(2, 8, "ab")


@pytest.mark.parametrize(
    ("restore", "held", "version"),
    [
        (Restore(5), ((4, 6, "ab"), (4, 5, "ab"), (5, 7, "ab"), (5, 8, "a")), (5, 7)),
        (Restore(5), ((4, 6, "ab"), (4, 5, "ab"), (5, 7, "a")), (4, 5)),  # step 6 was damaged
        (Restore(5, checkpoint="/runs/step-5"), ((4, 5, "ab"), (5, 7, "a")), None),
        (None, ((5, 0, "ab"),), (5, 0)),
    ],
)
def test_another_controller_finds_the_newest_in_the_vaults(
    restore: Restore | None, held: tuple[Any, ...], version: tuple[int, int] | None
):
    job = Job()
    job.begin(5, "ab", restore)
    job.versions.resume(
        [
            StoredSlot(SlotInfo(generation, rank, 2, step, 64, pinned=False), node)
            for generation, step, nodes in held
            for rank, node in enumerate(nodes)
        ]
    )
    assert job.newest == version
    assert (job.versions.confirmed is None) == (version is None)


def test_a_step_that_is_lost_is_a_version_no_longer():
    job = Job()
    job.begin(1, "ab")
    job.step(7, 7)
    job.begin(2, "ab", Restore(6, slots(1, 6, "ab")))
    assert job.newest == WeightVersion(1, 6)


def test_a_checkpoint_is_one_once_it_is_in_memory():
    job = Job()
    job.begin(4, "ab")
    job.step(9, 9)
    job.begin(5, "a", Restore(5, checkpoint="/runs/step-5"))
    assert job.newest == WeightVersion(4, 9)
    assert job.versions.confirmed is None, "the job goes back behind it"
    job.versions.on_mirrored(10, Mirrored(5, 0, 5))
    assert job.newest == WeightVersion(5, 5) > WeightVersion(4, 9)
