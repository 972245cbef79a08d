"""The Ray shell: two vaults that read each other through Ray's object store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from rayzero.workers.vault.actor import VAULT_COMMAND_THREADS, VaultActor
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import ConnectionLost, Restore, SlotGoneError, VaultGoneError
from tests.workers.vault.support import WorkerProcess, content, refs, table, write

pytestmark = pytest.mark.slow

NBYTES = 20 * 2**20  # more than one chunk


@pytest.fixture(scope="module")
def vaults() -> Iterator[dict[str, Any]]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    make = ray.remote(VaultActor).options(num_cpus=0, max_concurrency=VAULT_COMMAND_THREADS)
    vaults = {node: make.remote("job", node) for node in ("a", "b")}
    ray.get([one.set_peers.remote(vaults) for one in vaults.values()], timeout=200)
    yield vaults
    ray.shutdown()


def ask(vault: Any, method: str, *arguments: Any) -> Any:
    return ray.get(getattr(vault, method).remote(*arguments), timeout=200)


def test_a_replica_serves_when_the_first_vault_is_lost(vaults: dict[str, Any]):
    one = VaultClient(ask(vaults["a"], "address"), 0)
    other = VaultClient(ask(vaults["b"], "address"), 1)
    buffer = one.reserve(1, 0, 1, table(nbytes=NBYTES))
    write(buffer, 0, 4, pin=True)
    found = bytearray(NBYTES)

    source = other.open_source(Restore(4, tuple(refs((1, 0, 4)))))  # from the other node
    source.read(0, 0, memoryview(found))
    assert found == content(0, 4, NBYTES)
    source.close()

    assert ask(vaults["b"], "replicate", refs((1, 0, 4))) > NBYTES
    assert ask(vaults["b"], "inventory")[0].replica
    source = other.open_source(Restore(4, tuple(refs((1, 0, 4), node="b"))))
    source.read(0, 5, memoryview(found)[5:])
    assert found == content(0, 4, NBYTES)
    source.close()

    with pytest.raises(SlotGoneError, match="step 5 on node a"):
        other.open_source(Restore(5, tuple(refs((1, 0, 5)))))
    with pytest.raises(RayTaskError) as caught:
        ask(vaults["b"], "replicate", refs((1, 0, 9)))
    assert isinstance(caught.value, SlotGoneError)
    with pytest.raises(VaultGoneError, match="no vault is known on node c"):
        other.open_source(Restore(5, tuple(refs((1, 0, 5), node="c"))))
    for client in (one, other):
        client.close()


def test_a_death_reaches_who_polls_at_once(vaults: dict[str, Any]):
    with WorkerProcess("connect", ask(vaults["a"], "address"), worker=5) as worker:
        ask(vaults["a"], "usage")  # the road is warm
        poll = vaults["a"].poll.remote(200.0)
        assert ask(vaults["a"], "kill", worker.pid)
        assert ray.get(poll, timeout=100) == [ConnectionLost(5, worker.pid)]


def test_a_lost_vault_is_told_to_those_who_read_from_it(vaults: dict[str, Any]):
    client = VaultClient(ask(vaults["b"], "address"), 1)
    ray.kill(vaults["a"])
    with pytest.raises(VaultGoneError, match="node a is gone"):
        client.open_source(Restore(4, tuple(refs((1, 0, 4)))))
    client.close()
