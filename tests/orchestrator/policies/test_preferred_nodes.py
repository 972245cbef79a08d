from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.policies.placement import Capacity, ResourceRequest, preferred_nodes

NEED = ResourceRequest(1, 9, cpus=2.0, gpus=0.0, timeout_s=1.0)


def free_resources(**cpus: float) -> dict[str, Capacity]:
    return {node: Capacity(each, 0.0) for node, each in cpus.items()}


def test_node_with_most_free_resources_is_filled_first():
    assert preferred_nodes(4, NEED, free_resources(a=3, b=6, c=2), ()) == ["b", "b", "b", "a"]


def test_nodes_in_use_come_first():
    assert preferred_nodes(3, NEED, free_resources(a=2, b=6, c=2), {"c"}) == ["c", "b", "b"]


def test_workers_that_fit_nowhere_have_no_preferred_node():
    assert preferred_nodes(3, NEED, free_resources(a=2, b=1), ()) == ["a", None, None]


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
