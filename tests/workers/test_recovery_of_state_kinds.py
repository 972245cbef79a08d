"""Recovery of every kind of state: real processes, and a replica of the vault on another node.

One of two ranks is killed within a step, and its node's vault is lost; a spare replaces it,
and both start from the replicas. The result must equal that of a run without faults bit by bit.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayzero.engine.session import use_session
from rayzero.workers.messages import Crashed, Finished, MirrorPolicy, Stopped
from rayzero.workers.vault.records import Restore
from rayzero.workers.vault.vault import Vault
from tests.engine.state.blocks import Block, StateSession
from tests.engine.state.kinds import (
    KINDS,
    SEED,
    assert_states_equal,
    check_parts,
    make_engine,
    merge_blocks,
    train_until,
)
from tests.support.ranks import run_ranks
from tests.workers.local_workers import NODE, LocalWorkers, no_other_nodes
from tests.workers.recovery_checks import wait_for_lost_worker
from tests.workers.state_kind_jobs import AT, STEPS
from tests.workers.support import setup

WORLD = 2
pytestmark = pytest.mark.slow


def run_without_faults(rank: int, world: int, name: str, folder: str) -> tuple[Block, Block]:
    """The states after `AT` and `STEPS` steps."""
    kind = KINDS[name]
    with use_session(StateSession(seed=SEED)):
        engine, loader = make_engine(kind, kind.config(kind.stage, folder))
        train_until(engine, loader, AT)
        first = Block.of(engine)
        train_until(engine, loader, STEPS)
    blocks = first, Block.of(engine)
    engine.close()
    return blocks


class Workers:
    """Workers that all test parameters share until one fails, and the folder of their states."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.local: LocalWorkers | None = None
        self.alive: list[int] = []

    def ready(self) -> LocalWorkers:
        """Two live workers and a new vault."""
        if self.local is None:
            plan = MirrorPolicy(replicas=1, every_steps=1)
            spec = setup(
                entrypoint="tests.workers.state_kind_jobs:train",
                seed=SEED,
                steps=STEPS,
                output_dir=str(self.folder),
                working_dir=os.getcwd(),
                mirror=plan,
            )
            self.local = LocalWorkers(spec, WORLD)
            self.alive = [0, 1]
        else:
            self.local.vault.close()
            self.local.vault = Vault("job", NODE, no_other_nodes)
        return self.local

    def close(self) -> None:
        if self.local is not None:
            self.local.close()
        self.local = None


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(tmp_path_factory.mktemp("state"))
    yield workers
    workers.close()


def replicate(local: LocalWorkers, restore: Restore) -> Restore:
    """Copy these slots to another node's vault, and close the first vault."""
    origin = local.vault
    local.vault = Vault(
        "job", "other", lambda ref, offset, count: origin.read(*_key(ref), offset, count).data
    )
    assert local.vault.replicate(restore.slots) > 0
    origin.close()
    return Restore(restore.step, tuple(entry._replace(node_id="other") for entry in restore.slots))


def _key(ref):
    return ref.generation, ref.rank, ref.step


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_state_is_restored_bit_by_bit(workers: Workers, name: str) -> None:
    generation = 2 * list(KINDS).index(name) + 1
    local = workers.ready()
    try:
        repaired = _repaired(local, workers, generation)
    except BaseException:
        workers.close()
        raise
    expected = run_ranks(WORLD, run_without_faults, name, str(workers.folder))
    before = [entry[0] for entry in expected]
    check_parts(KINDS[name], before)
    final = merge_blocks([entry[1] for entry in expected])
    assert_states_equal(merge_blocks(repaired), final, exact_residuals=True)


def _repaired(local: LocalWorkers, workers: Workers, generation: int) -> list[Block]:
    """The state at the end of a run in which the second of two ranks died."""
    survivor, victim = workers.alive
    local.form(generation, [survivor, victim])
    spare = local.start_worker()
    assert wait_for_lost_worker(local, 60) == victim
    local.wait_step(survivor, generation, AT)
    local.workers[survivor].call("fence", generation)
    ended = local.wait_end(survivor, generation)
    assert isinstance(ended, Stopped | Crashed), local.texts(survivor)
    restore = local.slots(generation, WORLD)
    assert restore.step == AT
    local.form(generation + 1, [survivor, spare], replicate(local, restore))
    for index in (survivor, spare):
        assert isinstance(local.wait_end(index, generation + 1), Finished), local.texts(index)
    workers.alive = [survivor, spare]
    row = generation // 2
    files = [workers.folder / f"{row}-{rank}" for rank in range(WORLD)]
    return [pickle.loads(path.read_bytes()) for path in files]
