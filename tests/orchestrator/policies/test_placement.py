"""Which workers are members, where workers are placed, and which ranks they get."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.policies.membership import (
    Selected,
    WorkerLimits,
    not_enough_error,
    select_members,
)
from rayzero.orchestrator.policies.placement import (
    Capacity,
    FunctionCall,
    ResourceRequest,
    assign_ranks,
    cluster_too_small_error,
    missing_resources,
    preferred_nodes,
    total_fit,
)
from rayzero.workers.messages import RankAssignment, WorkerInfo


def request(
    min_workers: int = 2, max_workers: int = 4, cpus: float = 2, gpus: float = 0
) -> ResourceRequest:
    return ResourceRequest(min_workers, max_workers, cpus, gpus, timeout_s=30)


@pytest.mark.parametrize(
    ("nodes", "resources", "workers"),
    [
        ([Capacity(8, 0)], request(), 4),
        ([Capacity(3, 0), Capacity(3, 0)], request(), 2),  # none spans two nodes
        ([Capacity(64, 3)], request(gpus=1), 3),
        ([Capacity(1, 1)], request(min_workers=1, cpus=0.25, gpus=0.5), 2),
        ([], request(), 0),
    ],
)
def test_total_fit(nodes: list[Capacity], resources: ResourceRequest, workers: int):
    assert total_fit(nodes, resources) == workers


def test_cluster_too_small_error_names_resources_and_settings():
    text = str(
        cluster_too_small_error(
            [Capacity(2, 0)], Capacity(1.5, 0), request(min_workers=3), waited_s=30
        )
    )
    assert "room for 0 of at least 3 workers with 2 CPU each after 30 s" in text
    assert "it has 2 CPU and 0 GPU on 1 node, of which 1.5 CPU" in text
    assert "workers.start_timeout_s" in text
    assert total_fit([Capacity(2, 0)], request()) == 1


JOBS = {"a": Capacity(2, 0), "b": Capacity(1, 4)}


@pytest.mark.parametrize(
    ("nodes", "free", "need", "workers", "jobs", "text"),
    [
        ([Capacity(2, 0)], Capacity(0, 0), request(1), 0, {"a": Capacity(2, 0)},
         "2 CPUs: held by job a (2 CPUs)"),
        ([Capacity(4, 4)], Capacity(0, 0), request(2, gpus=2), 0, JOBS,
         "4 CPUs and 4 GPUs: held by job b (1 CPU and 4 GPUs), job a (2 CPUs), "
         "other work in the cluster (1 CPU)"),
        ([Capacity(64, 4)], Capacity(61, 0), request(1, gpus=1), 0, JOBS,
         "1 GPU: held by job b (4 GPUs)"),
        ([Capacity(6, 0)], Capacity(1, 0), request(3, cpus=1), 2, JOBS | {"c": Capacity(0, 0)},
         "1 CPU on one node for each worker; free on several nodes: 1 CPU"),
        ([Capacity(5, 0)], Capacity(0, 0), request(2), 1, {"a": Capacity(2.995, 0)},
         "2 CPUs: held by job a (2.995 CPUs)"),
        ([Capacity(4, 0)], Capacity(0, 0), request(4, cpus=1), 0,
         {name: Capacity(1, 0) for name in "dcba"},
         "4 CPUs: held by job a (1 CPU), job b (1 CPU), job c (1 CPU), 1 more"),
        ([Capacity(2, 0)], Capacity(2, 0), request(1, gpus=1), 0, {},
         "1 GPU: the cluster has none in all, until a node joins"),
        ([Capacity(2, 0)], Capacity(0, 0), request(2), 0, {"a": Capacity(2, 0)},
         "4 CPUs: held by job a (2 CPUs); the cluster has 2 CPUs in all, until a node joins"),
    ],
)  # fmt: skip
def test_missing_resources_names_who_holds_them(
    nodes: list[Capacity],
    free: Capacity,
    need: ResourceRequest,
    workers: int,
    jobs: dict[str, Capacity],
    text: str,
):
    assert missing_resources(nodes, free, need, workers, jobs) == text
    error = cluster_too_small_error(nodes, free, need, 30, text)
    assert error.seen.endswith(f"are free; it waited for {text}")


def worker(index: int, node: str) -> WorkerInfo:
    return WorkerInfo(index, node, f"host-{node}", "10.0.0.1", 100 + index)


def test_ranks_are_assigned_by_node():
    workers = [worker(0, "b"), worker(1, "a"), worker(2, "b"), worker(3, "a")]
    assert list(assign_ranks(workers, {"b": "vault-b"}).items()) == [
        (0, RankAssignment(0, 0, 2, "vault-b")),
        (2, RankAssignment(1, 1, 2, "vault-b")),
        (1, RankAssignment(2, 0, 2, "")),
        (3, RankAssignment(3, 1, 2, "")),
    ]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_ranks_and_local_ranks_are_contiguous(nodes: list[str]):
    ranks = assign_ranks([worker(index, node) for index, node in enumerate(nodes)], {})
    assert ranks[0].rank == 0
    assert [rank.rank for rank in ranks.values()] == list(range(len(nodes)))
    assert sorted(ranks) == list(range(len(nodes)))
    for node in set(nodes):
        on_node = [rank for index, rank in ranks.items() if nodes[index] == node]
        assert [rank.local_rank for rank in on_node] == list(range(len(on_node)))
        assert {rank.local_world_size for rank in on_node} == {len(on_node)}
        assert on_node[-1].rank - on_node[0].rank == len(on_node) - 1


@pytest.mark.parametrize(
    ("workers", "entered", "ranks"),
    [
        ("0a 2b 3b 4a", {0: 0, 1: 1, 2: 2, 3: 3}, [0, 4, 2, 3]),  # on the lost one's node
        ("1a 2b 3b 4c", {0: 0, 1: 1, 2: 2, 3: 3}, [4, 1, 2, 3]),  # on another one
        ("1a 2b 3b", {0: 0, 1: 1, 2: 2, 3: 3}, [3, 1, 2]),  # while there is none
        ("1a 2b 3b 4a", {0: 0, 1: 1, 2: 2, 3: 3}, [4, 1, 2, 3]),  # and it gives the rank back
        ("0a 1a 2b 3b 4b 5a", {0: 0, 1: 1, 2: 2, 3: 3}, [0, 1, 2, 3, 4, 5]),
        ("0a 3b", {0: 0, 1: 1, 2: 2, 3: 3}, [0, 3]),
    ],
)
def test_function_keeps_the_rank_that_it_was_entered_with(
    workers: str, entered: dict[int, int], ranks: list[int]
):
    members = [worker(int(index), node) for index, node in workers.split()]
    calls = {index: FunctionCall(rank, 4) for index, rank in entered.items()}
    assert list(assign_ranks(members, {}, calls, "aabb")) == ranks


@pytest.mark.parametrize(
    ("nodes", "replicas", "targets"),
    [
        ("aa", 1, ["", ""]),
        ("ab", 0, ["", ""]),
        ("ab", 3, ["b", "a"]),
        ("aabbc", 1, ["b", "b", "c", "c", "a"]),
        ("abc", 2, ["bc", "ca", "ab"]),
    ],
)
def test_slots_are_replicated_to_next_nodes(nodes: str, replicas: int, targets: list[str]):
    workers = [worker(index, node) for index, node in enumerate(nodes)]
    ranks = assign_ranks(workers, {}, replicas=replicas).values()
    assert ["".join(rank.replica_nodes) for rank in ranks] == targets


@given(st.data())
def test_ranks_of_any_history_are_kept_and_never_shared(data: st.DataObject):
    """Workers are lost, added, and entered anew, in any order."""
    calls: dict[int, FunctionCall] = {}
    members: list[WorkerInfo] = []
    nodes: list[str] = []
    new = itertools.count()
    for _ in range(data.draw(st.integers(1, 6))):
        lost = data.draw(st.sets(st.sampled_from(members))) if members else set()
        joining = data.draw(st.lists(st.sampled_from("abc"), max_size=3))
        members = [it for it in members if it not in lost]
        members += [worker(next(new), node) for node in joining]
        if not members:
            continue
        ranks = assign_ranks(members, {}, calls, nodes)
        assert [it.rank for it in ranks.values()] == list(range(len(members)))
        for it in members:
            if it.index in calls and calls[it.index].rank < len(members):
                assert ranks[it.index].rank == calls[it.index].rank
        anew = data.draw(st.sets(st.sampled_from(members)))
        calls |= {
            it.index: FunctionCall(ranks[it.index].rank, len(members))
            for it in members
            if it in anew or it.index not in calls
        }
        by_index = {it.index: it for it in members}
        nodes = [by_index[index].node_id for index in ranks]


NEED = ResourceRequest(1, 9, cpus=2.0, gpus=0.0, timeout_s=1.0)


def free_resources(**cpus: float) -> dict[str, Capacity]:
    return {node: Capacity(each, 0.0) for node, each in cpus.items()}


@pytest.mark.parametrize(
    ("count", "free", "in_use", "preferred"),
    [
        (4, {"a": 3, "b": 6, "c": 2}, "", ["b", "b", "b", "a"]),  # that with most is filled first
        (3, {"a": 2, "b": 6, "c": 2}, "c", ["c", "b", "b"]),  # after those in use
        (3, {"a": 2, "b": 1}, "", ["a", None, None]),  # the others fit nowhere
    ],
)
def test_preferred_nodes(
    count: int, free: dict[str, float], in_use: str, preferred: list[str | None]
):
    assert preferred_nodes(count, NEED, free_resources(**free), in_use) == preferred


@given(
    st.integers(0, 20),
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 9), max_size=6),
    st.sets(st.sampled_from("abcdef")),
)
def test_no_node_is_preferred_beyond_its_free_resources(
    count: int, cpus: dict[str, float], in_use: set[str]
):
    free = free_resources(**cpus)
    preferred = preferred_nodes(count, NEED, free, in_use)
    assert len(preferred) == count
    workers = Counter(node for node in preferred if node is not None)
    assert all(times <= free[node].fits(NEED) for node, times in workers.items())
    unused = sum(capacity.fits(NEED) for capacity in free.values()) - workers.total()
    assert unused == 0 or None not in preferred
    assert all(node is None for node in preferred[workers.total() :])


def as_workers(kinds: str) -> list[WorkerInfo]:
    return [
        WorkerInfo(index, "draining" if kind.isupper() else "n", "host", "ip", index)
        for index, kind in enumerate(kinds)
    ]


def select(workers: str, limits: WorkerLimits) -> Selected | None:
    """`m` a member, `r` another ready worker; capitals: on a draining node."""
    members = {index for index, kind in enumerate(workers) if kind.lower() == "m"}
    return select_members(as_workers(workers), limits, members, {"draining"})


def indices(workers: Iterable[WorkerInfo]) -> list[int]:
    return [worker.index for worker in workers]


@pytest.mark.parametrize(
    ("workers", "limits", "members", "displaced", "surplus"),
    [
        ("mmm", WorkerLimits(2, 3), [0, 1, 2], [], []),
        ("mmr", WorkerLimits(2, 4), [0, 1, 2], [], []),
        ("rmm", WorkerLimits(2, 2), [1, 2], [], [0]),  # members first
        ("rmm", WorkerLimits(2, 2, 1), [1, 2], [], []),  # kept as a spare
        ("mmmm", WorkerLimits(1, 2), [0, 1], [], [2, 3]),
        ("mMm", WorkerLimits(2, 3), [0, 2], [1], []),
        ("mM", WorkerLimits(2, 3), [0, 1], [], []),  # no other workers
        ("mMr", WorkerLimits(2, 3), [0, 2], [1], []),
        ("MMM", WorkerLimits(2, 3), [0, 1], [2], []),
        ("MMr", WorkerLimits(1, 3), [2], [0, 1], []),
        # Of a step in 4 parts: 1, 2 or 4 ranks; another worker waits for the fourth.
        ("mmm", WorkerLimits(2, 4, parts=4), [0, 1], [], []),
        ("mmrr", WorkerLimits(2, 4, parts=4), [0, 1, 2, 3], [], []),
        ("mmrrr", WorkerLimits(2, 4, parts=4), [0, 1, 2, 3], [], [4]),
        ("mMmm", WorkerLimits(2, 4, parts=4), [0, 2], [1], []),
        ("mm", WorkerLimits(2, 2, parts=3), [0, 1], [], []),  # no number fits: the script says so
    ],
)
def test_selection(
    workers: str, limits: WorkerLimits, members: list[int], displaced: list[int], surplus: list[int]
):
    selection = select(workers, limits)
    assert indices(selection.members) == members
    assert indices(selection.displaced) == displaced
    assert indices(selection.surplus) == surplus


def test_too_few_workers():
    assert select("m", WorkerLimits(2, 4)) is None
    text = str(not_enough_error(1, WorkerLimits(2, 4), 300.0))
    assert "1 of at least 2 workers are left, and no replacement was ready within 300 s" in text
    assert "workers.start_timeout_s" in text


def test_ranks_that_do_not_divide_the_step_wait():
    limits = WorkerLimits(2, 3, parts=3)
    assert select("mm", limits) is None
    assert "2 of at least 3 workers are left" in str(not_enough_error(2, limits, 300.0))


@given(
    st.text("mrMR", max_size=9),
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(0, 2),
    st.integers(0, 12),
)
def test_selection_is_within_limits_and_stable(
    workers: str, min_workers: int, extra: int, spares: int, parts: int
):
    limits = WorkerLimits(min_workers, min_workers + extra, spares, parts)
    selection = select(workers, limits)
    if selection is None or len(workers) < min_workers:
        assert selection is None
        assert parts or len(workers) < min_workers
        return
    assert min_workers <= len(selection.members) <= limits.max
    released = {*indices(selection.displaced), *indices(selection.surplus)}
    assert not released & selection.indices
    ready = [worker for worker in as_workers(workers) if worker.index not in released]
    repeated = select_members(ready, limits, selection.indices, {"draining"})
    assert repeated.members == selection.members
