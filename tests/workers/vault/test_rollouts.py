"""A vault's buffer of rollouts."""

from __future__ import annotations

from threading import Event

import pytest

from rayzero.engine.errors import DataError
from rayzero.workers.rollouts.buffer_client import RolloutClient
from rayzero.workers.rollouts.ledger import RolloutPlan
from rayzero.workers.vault.records import VaultGoneError
from tests.workers.vault.support import VaultCluster

PLAN, HOST, LIMIT_S = RolloutPlan(1, 2), "127.0.0.1", 30.0


def test_buffer_is_opened_told_and_closed(cluster: VaultCluster) -> None:
    vault = cluster.vault()
    with pytest.raises(VaultGoneError, match="no buffer of rollouts"):
        vault.update_rollouts(1, 0, ())
    address = vault.open_rollouts(PLAN, HOST, LIMIT_S)
    assert address.host == HOST
    assert str(address.secret) not in repr(address)
    client = RolloutClient(lambda: address, LIMIT_S)

    def call(name: str, *arguments: object, **named: list[bytes]) -> dict[str, object]:
        return client.call(name, *arguments, check=lambda: None, **named)[0]  # type: ignore[arg-type]

    call("issue", [0, 1], contents=[b"a", b"b"])
    assert call("take", 0, 7, 1, [], 0.0)["leases"]
    counts = vault.update_rollouts(3, 1, ())
    assert (counts.published, counts.leased, counts.waiting) == (1, (1,), (1,))
    assert vault.update_rollouts(3, 1, (7,)).leased == (0,), "worker 7 is lost"
    taken = call("take", 0, 8, 2, [], 0.0)
    assert len(taken["leases"]) == 2  # type: ignore[arg-type]
    assert taken["version"] == [3, 1]
    another = vault.open_rollouts(PLAN, HOST, LIMIT_S)
    assert another != address
    assert vault.update_rollouts(3, 1, ()).leased == (0,), "it is empty"
    client.close()
    impatient, continues = vault.open_rollouts(PLAN, HOST, 0.4), Event()
    vault._rollouts.call_soon(continues.wait)  # type: ignore[union-attr]
    with pytest.raises(VaultGoneError, match="does not answer"):
        vault.update_rollouts(4, 2, ())
    continues.set()
    reader = RolloutClient(lambda: impatient, LIMIT_S)
    taken, _ = reader.call("take", 0, 8, 1, [], 0.0, check=lambda: None)
    assert taken["version"] == [4, 2], "it was told"
    reader.close()
    quick = RolloutClient(lambda: address, 0.1)
    with pytest.raises(DataError, match="has not answered"):
        quick.call("take", 0, 7, 1, [], 0.0, check=lambda: None)
    vault.close_rollouts()
    with pytest.raises(VaultGoneError):
        vault.update_rollouts(3, 1, ())
    vault.open_rollouts(PLAN, HOST, LIMIT_S)  # closed with the vault
