"""Two vault actors that read from each other through Ray's object store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from rayzero.workers.vault.actor import VAULT_CALL_THREADS, VaultActor
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import ConnectionLost, Restore, SlotGoneError, VaultGoneError
from tests.workers.vault.support import content, refs, table, worker_process, write

pytestmark = pytest.mark.slow

NBYTES = 20 * 2**20  # more than one chunk


@pytest.fixture(scope="module")
def vaults() -> Iterator[dict[str, Any]]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    make = ray.remote(VaultActor).options(num_cpus=0, max_concurrency=VAULT_CALL_THREADS)
    vaults = {node: make.remote("job", node) for node in ("a", "b")}
    ray.get([vault.set_peers.remote(vaults) for vault in vaults.values()], timeout=200)
    yield vaults
    ray.shutdown()


def call(vault: Any, method: str, *arguments: Any) -> Any:
    return ray.get(getattr(vault, method).remote(*arguments), timeout=200)


def test_replica_serves_reads_after_vault_loss(vaults: dict[str, Any]):
    first = VaultClient(call(vaults["a"], "address"), 0)
    second = VaultClient(call(vaults["b"], "address"), 1)
    buffer = first.reserve(1, 0, 1, table(nbytes=NBYTES))
    write(buffer, 0, 4, pin=True)
    data = bytearray(NBYTES)

    source = second.open_source(Restore(4, tuple(refs((1, 0, 4)))))  # from the other node
    source.read(0, 0, memoryview(data))
    assert data == content(0, 4, NBYTES)
    source.close()

    assert call(vaults["b"], "replicate", refs((1, 0, 4))) > NBYTES
    assert call(vaults["b"], "inventory")[0].replica
    source = second.open_source(Restore(4, tuple(refs((1, 0, 4), node="b"))))
    source.read(0, 5, memoryview(data)[5:])
    assert data == content(0, 4, NBYTES)
    source.close()

    with pytest.raises(SlotGoneError, match="step 5 on node a"):
        second.open_source(Restore(5, tuple(refs((1, 0, 5)))))
    with pytest.raises(RayTaskError) as caught:
        call(vaults["b"], "replicate", refs((1, 0, 9)))
    assert isinstance(caught.value, SlotGoneError)
    with pytest.raises(VaultGoneError, match="no vault is known on node c"):
        second.open_source(Restore(5, tuple(refs((1, 0, 5), node="c"))))
    for client in (first, second):
        client.close()


def test_blocked_poll_reports_lost_connection(vaults: dict[str, Any]):
    with worker_process("connect", call(vaults["a"], "address"), worker=5) as worker:
        call(vaults["a"], "usage")  # the connection is open
        poll = vaults["a"].poll.remote(200.0)
        assert call(vaults["a"], "kill", worker.pid)
        assert ray.get(poll, timeout=100) == [ConnectionLost(5, worker.pid)]


def test_link_is_measured_where_replicas_are_read_and_a_check_begins_with_the_vault(
    vaults: dict[str, Any],
):
    checked = ray.remote(VaultActor).options(num_cpus=0).remote("job", "c", health_limit_s=120.0)
    assert call(vaults["a"], "measure_link", "b") > 0
    with pytest.raises(VaultGoneError, match="no vault is known on node c"):
        call(vaults["a"], "measure_link", "c")
    deadline_s = time.monotonic() + 120
    while (report := call(checked, "health")) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert report.incomplete == ""
    assert report.figures["memory"] > 0
    ray.kill(checked)


def test_reading_from_lost_vault_raises(vaults: dict[str, Any]):
    client = VaultClient(call(vaults["b"], "address"), 1)
    ray.kill(vaults["a"])
    with pytest.raises(VaultGoneError, match="node a is gone"):
        client.open_source(Restore(4, tuple(refs((1, 0, 4)))))
    client.close()
