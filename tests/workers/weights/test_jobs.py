"""A reader beside a job that is killed and resized: at every version it has the trainer's weights.

Real workers and a vault, without Ray. The oracles are plain torch, and what the trainer's engine
gathers, which goes through no vault.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rayzero.orchestrator.control.weight_versions import WeightVersions
from rayzero.orchestrator.progress import JobProgress
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.messages import Mirrored, MirrorPolicy, StepReport
from rayzero.workers.step_rows import combine
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import Restore
from rayzero.workers.weights.directory import WeightVersion
from rayzero.workers.weights.reader import WeightReader
from tests.workers.event_controller import MOST, Event, EventController, fault
from tests.workers.local_workers import NODE, LocalWorkers
from tests.workers.recovery_jobs import engine_config, make_model, oracle
from tests.workers.support import mirrored_setup
from tests.workers.weights.jobs import LIMIT_S, read_path, weights_path

STEPS = 14
pytestmark = pytest.mark.slow


class VersionController(EventController):
    """Tells of the versions, as the job's controller does."""

    def __init__(self, local: LocalWorkers, events: Sequence[Event]) -> None:
        super().__init__(local, events, seed=0)
        self._job: Any = SimpleNamespace(generation=None)
        self.versions = WeightVersions(self._job)
        self._progress = JobProgress()
        self._told: dict[int, int] = {}

    def _choose_members(self, restore: Restore | None) -> None:
        super()._choose_members(restore)
        number, size = len(self.starts), len(self._members)
        self._job.generation = SimpleNamespace(
            number=number,
            world_size=size,
            assignments=dict.fromkeys(self._members),
            workers=[SimpleNamespace(node_id=NODE)] * size,
            restore=restore,
        )
        self._progress.start_generation(number, size, restore.step if restore else 0)
        self.versions.start_generation(self._job.generation)

    def _act(self, generation: int) -> None:
        super()._act(generation)
        for index in self._members:
            seen = self._local.seen[index]
            for message in seen[self._told.get(index, 0) :]:
                if isinstance(message, Mirrored):
                    self.versions.on_mirrored(index, message)
                elif isinstance(message, StepReport):
                    record = self._progress.add_rows(combine([index], [message]))
                    if record is not None:
                        self.versions.on_step_finished(record)
            self._told[index] = len(seen)


class Reader:
    """Reads version after version, and lets the trainer go on after each."""

    def __init__(self, folder: Path, controller: VersionController, address: str) -> None:
        self.read: dict[WeightVersion, dict[str, Tensor]] = {}
        self._folder = folder
        self._versions = controller.versions
        self._address = address
        self._is_ending = False
        self._thread = Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_ending = True
        self._thread.join(LIMIT_S)

    def _check(self) -> None:
        if self._is_ending:
            raise SystemExit

    def _run(self) -> None:
        model = make_model(torch.float64)
        with closing(VaultClient(self._address, 99)) as client:
            reader = WeightReader(
                lambda: self._versions.newest, lambda: client, self._check, LIMIT_S
            )
            while not self._is_ending:
                version = reader.refresh(model)
                if version not in self.read:
                    state = model.state_dict()
                    self.read[version] = {name: it.clone() for name, it in state.items()}
                    read_path(self._folder, version.step).touch()


def run_job(folder: Path, stage: int, events: Sequence[Event]) -> Reader:
    spec = mirrored_setup(
        folder,
        "tests.workers.weights.jobs:train",
        engine_config=engine_config(stage),
        args={"gates": [event.step for event in events if not event.faults]},
        faults=tuple(it for event in events for it in event.faults),
        mirror=MirrorPolicy(replicas=1, every_steps=1, version_every_steps=1),
        ledger=False,
        steps=STEPS,
    )
    local = LocalWorkers(spec, MOST)
    try:
        controller = VersionController(local, events)
        with closing(Reader(folder, controller, local.vault.address())) as reader:
            controller.run(240)
        assert controller.wrong == []
    finally:
        local.close()
    fired = [it.fault for it in FaultRecord(folder).read()]
    assert sorted(fired) == sorted(spec_fault for event in events for spec_fault in event.faults)
    assert len(controller.starts) == len(events) + 1
    return reader


@pytest.mark.parametrize(
    ("stage", "phases"),
    [
        (0, ("reduce", "mirror")),
        (1, ("update", "data")),
        (2, ("publish", "backward")),
        (3, ("mirror", "forward")),
    ],
)
def test_each_version_is_the_trainers_weights(
    tmp_path: Path, stage: int, phases: tuple[str, str]
) -> None:
    """Through kills, with another worker in place, and with one less and one more."""
    events = [
        Event(3, "replace", (fault("kill", 1, 3, phases[0]),)),
        Event(6, "shrink"),
        Event(8, "grow"),
        Event(11, "kill", (fault("kill", 2, 11, phases[1]),)),
    ]
    reader = run_job(tmp_path, stage, events)
    steps = {version.step for version in reader.read}
    assert steps >= {*range(STEPS)}, "the trainer waits for each"
    expected = {step: oracle(step) for step in steps}
    compared = 0
    for version, weights in reader.read.items():
        for name, value in expected[version.step].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)
        # The generation that made a step, or the one that went on from it.
        paths = [
            path
            for generation in range(version.generation, len(events) + 2)
            if (path := weights_path(tmp_path, generation, version.step)).exists()
        ]
        for path in paths[:1]:
            compared += 1
            gathered = cast(dict[str, Tensor], torch.load(path, weights_only=True))
            assert gathered.keys() == weights.keys()
            assert all(torch.equal(gathered[name], weights[name]) for name in weights)
    assert compared >= STEPS
