"""The wait for workers' reservations, in virtual time and without Ray; how a worker is started in
one, and what becomes of the reservation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from ray.exceptions import GetTimeoutError

from rayzero.orchestrator.cluster import actor_pool, ray_api
from rayzero.orchestrator.cluster.actor_pool import ActorPool, Reservation
from rayzero.orchestrator.cluster.head_calls import HeadCalls
from rayzero.orchestrator.cluster.ray_api import NodeTable
from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.cluster.worker_group import WAITING_INTERVAL_S, WorkerGroup
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.policies.placement import Capacity, ResourceRequest
from rayzero.workers.lifetimes import owned_name
from tests.integration.tiny import make_spec
from tests.orchestrator.support import VirtualClock, settle


class FullPool:
    """Grants no reservation."""

    workers = ()

    def __init__(self) -> None:
        self.jobs = {"a": Capacity(2, 0)}

    async def reserve(self, number: int, need: ResourceRequest) -> None: ...

    async def start_in_ready(self, need: ResourceRequest) -> tuple[()]:
        return ()

    async def held_by_other_jobs(self) -> dict[str, Capacity]:
        return self.jobs

    async def remove_all(self) -> None: ...


@pytest.fixture
def full_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    async def inline(_: HeadCalls, function: Callable[[], Any]) -> Any:
        return function()

    nodes = NodeTable({"n": Capacity(2, 0)}, {"n": Capacity(0, 0)})
    monkeypatch.setattr(ray_api, "node_snapshot", lambda: nodes)
    monkeypatch.setattr(HeadCalls, "__call__", inline)


@pytest.mark.usefixtures("full_cluster")
async def test_queueing_is_said_again_and_again_and_ends_with_who_holds_the_resources():
    pool, clock = FullPool(), VirtualClock()
    said: list[str] = []
    vaults: Any = SimpleNamespace(
        mail=None, commands=SimpleNamespace(watch=lambda _: None), head=HeadCalls()
    )
    group = WorkerGroup(make_spec(Path("unused")), clock, False, vaults, object)
    group._pool = pool  # type: ignore[assignment]
    group._resources = ResourceRequest(2, 2, 1.0, 0.0, 12.0)
    waiting = asyncio.ensure_future(group._acquire(said.append))
    await clock.advance(WAITING_INTERVAL_S - 0.1)
    assert said == []  # a cluster that is only slow says nothing
    await clock.advance(0.2)
    assert said == ["2 CPUs: held by job a (2 CPUs)"]
    pool.jobs = {"b": Capacity(2, 0)}
    await clock.advance(WAITING_INTERVAL_S)
    assert said[1:] == ["2 CPUs: held by job b (2 CPUs)"]
    await clock.advance(2.0)
    await settle()
    with pytest.raises(JobFailedError, match=r"it waited for 2 CPUs: held by job b \(2 CPUs\)"):
        await waiting


class RecordedActor:
    """Ray's handle of an actor's class."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []

    def options(self, **options: Any) -> RecordedActor:
        self._options = options
        return self

    def remote(self, spec: Any, index: int, orphan_s: float) -> None:
        assert orphan_s == 600
        self.started.append(self._options)


async def test_reservation_whose_request_ray_gave_up_is_not_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made: dict[str, object] = {}

    def receive(_: object, *, name: str, **__: object) -> None:
        assert name not in made
        made[name] = object()
        raise GetTimeoutError("GCS server is dead")

    def find(name: str) -> object:
        if name not in made:
            raise ValueError(name)
        return made[name]

    monkeypatch.setattr(actor_pool, "placement_group", receive)
    monkeypatch.setattr(actor_pool, "get_placement_group", find)
    vaults = VaultGroup(make_spec(tmp_path))
    pool = ActorPool(make_spec(tmp_path), cast(Any, None), vaults, count(), object)
    group = await pool._request(ResourceRequest(1, 1, 1.0, 0.0, 30.0), None, ())
    assert [*made.values()] == [group]


@pytest.mark.parametrize(
    ("cpus", "gpus", "threads", "expected"),
    [(208, 8, 0, 26), (26, 8, 0, 3), (4, 8, 0, 1), (6, 0, 0, 6), (208, 8, 4, 4)],
)
async def test_threads_are_the_nodes_unless_given(
    tmp_path: Path, cpus: float, gpus: float, threads: int, expected: int
):
    env = {"NCCL_DEBUG": "INFO"}
    vaults = VaultGroup(make_spec(tmp_path), orphan_s=600)
    pool: Any = ActorPool(make_spec(tmp_path), cast(Any, None), vaults, count(), object)
    pool._actor, reservation = RecordedActor(), Reservation(cast(Any, None))
    pool._reservations = [reservation]
    need = ResourceRequest(1, 1, 1.0, 1.0, 30.0, threads, env)
    await pool._start(reservation, "node", need, Capacity(cpus, gpus))
    (options,) = pool._actor.started
    assert (options["num_cpus"], options["num_gpus"]) == (1, 1)
    assert (options["name"], options["lifetime"]) == ("rayzero/tiny//0", "detached")
    assert options["runtime_env"]["env_vars"] == {**env, "OMP_NUM_THREADS": str(expected)}


@dataclass(frozen=True)
class Group:
    """A placement group; bytes have a `hex`, as Ray's ids."""

    id: bytes


@pytest.fixture
def groups(full_cluster: None, monkeypatch: pytest.MonkeyPatch) -> dict[Group, str]:
    """Ray's placement groups, all granted, and their nodes. The node `leaves` is draining."""
    groups: dict[Group, str] = {}
    numbers = count()

    def make(_: object, *, bundle_label_selector: object, **__: object) -> Group:
        group = Group(b"%d" % next(numbers))
        groups[group] = "stays" if "leaves" in str(bundle_label_selector) else "leaves"
        return group

    def find(name: str) -> None:
        raise ValueError(name)

    def table() -> dict[str, Any]:
        return {
            group.id.hex(): {"state": "CREATED", "bundles_to_node_id": {0: node}}
            for group, node in groups.items()
        }

    monkeypatch.setattr(actor_pool, "placement_group", make)
    monkeypatch.setattr(actor_pool, "get_placement_group", find)
    monkeypatch.setattr(actor_pool, "remove_placement_group", groups.pop)
    monkeypatch.setattr(actor_pool, "placement_group_table", table)
    monkeypatch.setattr(HeadCalls, "post", lambda _, call, *args: call(*args))
    alive = dict.fromkeys(("leaves", "stays"), Capacity(4, 0))
    monkeypatch.setattr(ray_api, "node_capacities", lambda: alive)
    monkeypatch.setattr(ray_api, "draining_node_ids", lambda: {"leaves"})
    monkeypatch.setattr(actor_pool.ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray_api, "wait_gone", AsyncMock())
    return groups


async def test_reservation_moves_off_a_node_that_leaves_and_waits_longer_after_each_failed_start(
    tmp_path: Path, groups: dict[Group, str]
):
    nodes, clock = list[str](), VirtualClock()
    vaults: Any = SimpleNamespace(start=nodes.append, orphan_s=600, head=HeadCalls())
    pool: Any = ActorPool(make_spec(tmp_path), clock, vaults, count(), object)
    pool._actor, need = RecordedActor(), ResourceRequest(1, 1, 1.0, 0.0, 30.0)
    await pool.reserve(1, need)
    assert [*groups.values()] == ["leaves"]
    assert await pool.start_in_ready(need) == []
    assert [*groups.values()] == ["stays"]
    delays_s = list[float]()
    for _ in range(8):
        (worker,) = await pool.start_in_ready(need)
        delays_s.append(pool.start_failed(worker))
        assert await pool.start_in_ready(need) == []
        await clock.advance(delays_s[-1])
    assert delays_s == [1, 2, 4, 8, 16, 32, 60, 60]
    (worker,) = await pool.start_in_ready(need)
    assert (worker.index, nodes) == (8, ["stays"] * 9)
    worker.reservation.draining = True
    pool.free(worker, 0.0)
    assert (pool.workers, pool.unoccupied, groups) == ([], [], {})
    await pool.reserve(1, need)
    for started in (0, 1):
        assert len(await pool.start_in_ready(need)) == started
    await pool.remove_all()
    assert (pool.workers, pool.unoccupied, groups) == ([], [], {})


@pytest.mark.usefixtures("full_cluster")
async def test_jobs_hold_what_is_granted_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entries = [
        ("other", "CREATED", {"CPU": 2.0, "GPU": 1.0}),
        ("other", "CREATED", {"CPU": 1.0}),
        ("other", "PENDING", {"CPU": 4.0}),
        ("waits", "PENDING", {"CPU": 4.0}),
        ("tiny", "CREATED", {"CPU": 8.0}),  # the pool's own
    ]
    table = {
        str(number): {"name": owned_name(job, "1", "0"), "state": state, "bundles": {0: bundle}}
        for number, (job, state, bundle) in enumerate(entries)
    }
    table["of no job"] = {"name": "theirs", "state": "CREATED", "bundles": {0: {"CPU": 1.0}}}
    monkeypatch.setattr(actor_pool, "placement_group_table", lambda: table)
    vaults = VaultGroup(make_spec(tmp_path))
    pool = ActorPool(make_spec(tmp_path), cast(Any, None), vaults, count(), object)
    assert await pool.held_by_other_jobs() == {"other": Capacity(3, 1)}
