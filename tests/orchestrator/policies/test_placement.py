"""Where workers are placed, and which ranks they get."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
