"""The Ray actor around a vault: a thin shell. Imports no torch, so that it starts fast.

Made with `num_cpus=0` on its node and `max_concurrency=COMMAND_THREADS`; then told of the others by
`meet`, again whenever one of them is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rayzero.engine.errors import RayzeroError
from rayzero.workers import node_faults
from rayzero.workers.faults import parse
from rayzero.workers.messages import RankFile, SlotInfo, SlotRef, VaultNews
from rayzero.workers.vault.errors import VaultGoneError
from rayzero.workers.vault.faulty import FaultyStore
from rayzero.workers.vault.vault import Vault

COMMAND_THREADS = 8
"""The long poll, a checkpoint, a copy and a stack dump hold one each; the others answer at once."""

_FETCH_S = 30.0


class VaultActor:
    """One node's vault.

    Args:
        job: the job's name.
        node_id: the node that this actor is on.
        faults: of the job; those of the store happen here.
        output_dir: where those are recorded that happened.
    """

    def __init__(
        self, job: str, node_id: str, faults: Sequence[str] = (), output_dir: str = ""
    ) -> None:
        with suppress(OSError):  # Ray makes workers nice; who notices deaths should not wait
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._peers: Mapping[str, Any] = {}
        self._store = FaultyStore(faults, output_dir)
        self._vault = Vault(job, node_id, self._fetch, write_file=self._store.write)

    def address(self) -> str:
        """Where workers of this node connect; answers as soon as the vault serves."""
        return self._vault.address

    def meet(self, peers: Mapping[str, Any]) -> None:
        """Handles of the other nodes' vaults, in place of those it knew."""
        self._peers = dict(peers)

    def poll(self, timeout_s: float) -> list[VaultNews]:
        return [*self._vault.poll(timeout_s), *self._store.fired()]

    def inventory(self) -> list[SlotInfo]:
        return self._vault.inventory()

    def unpin(self, generation: int, step: int) -> None:
        self._vault.unpin(generation, step)

    def replicate(self, slots: Sequence[SlotRef]) -> int:
        return self._vault.replicate(slots)

    def write(self, folder: str, slots: Sequence[SlotRef]) -> list[RankFile]:
        return self._vault.write(folder, slots)

    def read(
        self, generation: int, rank: int, step: int, offset: int, length: int
    ) -> NDArray[np.uint8]:
        """For other nodes' vaults: bytes of an image, through Ray's object store."""
        return self._vault.read(generation, rank, step, offset, length)

    def inspect(self, pid: int) -> str:
        return self._vault.inspect(pid)

    def kill(self, pid: int) -> bool:
        return self._vault.kill(pid)

    def inject(self, faults: Sequence[str]) -> None:
        """Further faults: all of the job's from now on."""
        self._store.want(faults)

    def obstacle(self, fault: str, is_here: bool, controller_network: str) -> str:
        return node_faults.obstacle(parse(fault), is_here, controller_network)

    def strike(self, fault: str) -> None:
        node_faults.strike(parse(fault))

    def usage(self) -> dict[str, Any]:
        return self._vault.usage()

    def _fetch(self, ref: SlotRef, offset: int, length: int) -> memoryview:
        """Called by the vault's own threads."""
        peer = self._peers.get(ref.node_id)
        if peer is None:
            raise VaultGoneError(f"no vault is known on node {ref.node_id}")
        answer = peer.read.remote(ref.generation, ref.rank, ref.step, offset, length)
        try:
            found: NDArray[np.uint8] = ray.get(answer, timeout=_FETCH_S)
        except RayTaskError as error:
            if isinstance(error.cause, RayzeroError):
                raise error.cause from None
            raise VaultGoneError(f"the vault on node {ref.node_id} failed: {error}") from None
        except GetTimeoutError:
            raise VaultGoneError(
                f"the vault on node {ref.node_id} did not answer within {_FETCH_S:g} s"
            ) from None
        except RayError as error:
            raise VaultGoneError(f"the vault on node {ref.node_id} is gone: {error}") from None
        return found.data
