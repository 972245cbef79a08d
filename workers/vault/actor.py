"""The Ray actor of a vault, which is its node's agent, too. Imports no torch, so it starts fast.

The actor is created on its node with `num_cpus=0` and `max_concurrency=VAULT_CALL_THREADS`. The
controller calls `open` to get its address, and `wait_end` to watch whether it lives; commands then
come over the agent's stream. The controller passes it the other nodes' vaults by `set_peers`, and
calls that again whenever one of them is replaced.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Event, Lock
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rayzero.engine.errors import RayzeroError
from rayzero.workers.agent.link import AgentAddress, Attach, Obedience, worker_socket
from rayzero.workers.agent.node_agent import AgentServer
from rayzero.workers.chaos.inject import FaultRecord, FaultSchedule, inject_store_faults
from rayzero.workers.chaos.node import inject_node_fault, why_impossible
from rayzero.workers.chaos.spec import FaultFired, FaultSpec
from rayzero.workers.lifetimes import VAULT_ASKS, OrphanWatch
from rayzero.workers.vault.images import VERIFY_S_PER_BYTE
from rayzero.workers.vault.process_end import read_process_end
from rayzero.workers.vault.records import ConnectionLost, SlotRef, VaultEvent, VaultGoneError
from rayzero.workers.vault.vault import Vault

VAULT_CALL_THREADS = 8
"""Threads for calls: `wait_end` holds one, the others serve the vaults of other nodes."""

_FETCH_TIMEOUT_S = 30.0


class VaultActor(Vault):
    """One node's vault. The controller's commands are the methods of `Vault` and of this class.

    Args:
        job: the job's name.
        node_id: the node that this actor runs on.
        faults: the job's faults; those of the store are injected here.
        output_dir: the folder of the record of injected faults.
        orphan_s: as for `OrphanWatch`.
        health_limit_s: time limit of a check of the node that begins at once; None: no check.
    """

    def __init__(
        self,
        job: str,
        node_id: str,
        faults: Sequence[FaultSpec] = (),
        output_dir: str = "",
        orphan_s: float = 0.0,
        health_limit_s: float | None = None,
    ) -> None:
        with suppress(OSError):  # Ray raises workers' niceness; detecting a death must not wait
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._agent: AgentServer | None = None
        self._own_names = job, node_id
        self._end_lock = Lock()  # Ray calls from several threads
        self._asked_again = Event()  # of the newest `wait_end`
        self._watched_by = Obedience()
        self._peers: Mapping[str, Any] = {}
        self._fired: deque[FaultFired] = deque()
        self._faults = FaultSchedule(FaultRecord(output_dir), self._fired.append)
        self.inject(faults)
        before_write = partial(inject_store_faults, self._faults)
        super().__init__(job, node_id, self._fetch_remote, self._copy_to, before_write=before_write)
        if health_limit_s is not None:
            self.check_health(health_limit_s)
        OrphanWatch(orphan_s, VAULT_ASKS)

    def open(self, run: str) -> AgentAddress:
        """Listens for the controller and for the workers of a run. Idempotent. Raises ConfigError
        if no interface of this node has Ray's address of the node."""
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        if self._agent is None:
            self._agent = AgentServer(host, self, self.poll, process_end_event)
        job, node_id = self._own_names
        self._agent.serve_workers(worker_socket(job, run, node_id))
        return AgentAddress(self.address(), host, self._agent.port, self._agent.secret)

    def wait_end(self, controller: Attach) -> None:
        """Waits until this method is called again, as by a later controller. Returns at once for a
        controller that has been superseded. Each call holds a thread, also if its caller has ended.
        Ray fails the call, with the cause, when this process or its node ends."""
        asked_again = Event()
        with self._end_lock:
            if not self._watched_by.accepts(controller):
                return
            self._watched_by.supersede(controller)
            self._asked_again.set()
            self._asked_again = asked_again
        asked_again.wait()

    def set_peers(self, peers: Mapping[str, Any]) -> None:
        """Replaces the actor handles of the other nodes' vaults, by node id."""
        self._peers = dict(peers)

    def poll(self, timeout_s: float) -> list[VaultEvent]:
        lost = super().poll(timeout_s)
        if self._agent is not None and not self._agent.is_obeying:
            self._registry.give_up_checkpoints()
        return [*lost, *(self._fired.popleft() for _ in range(len(self._fired)))]

    def inject(self, faults: Sequence[FaultSpec]) -> None:
        """Replaces the list of the job's faults."""
        self._faults.set_faults(faults)

    def why_not_injectable(
        self, fault: FaultSpec, is_controller_node: bool, controller_network: str
    ) -> str:
        return why_impossible(fault, is_controller_node, controller_network)

    def inject_node_fault(self, fault: FaultSpec) -> None:
        if fault.kind == "slow_node":
            self.slow_down()
        else:
            inject_node_fault(fault)

    # The methods below are called by the vault's own threads.

    def _fetch_remote(self, ref: SlotRef, offset: int, length: int) -> memoryview:
        """Reads from another node's vault through Ray's object store."""
        limit_s = _FETCH_TIMEOUT_S + length * VERIFY_S_PER_BYTE
        version = ref.generation, ref.rank, ref.step
        data: NDArray[np.uint8] = self._ask(ref.node_id, limit_s, "read", *version, offset, length)
        return data.data

    def _copy_to(self, node: str, ref: SlotRef, limit_s: float) -> int:
        nbytes: int = self._ask(node, limit_s, "replicate", [ref])
        return nbytes

    def _ask(self, node: str, limit_s: float, method: str, *arguments: Any) -> Any:
        """Calls another node's vault, and returns its reply. Raises the other vault's RayzeroError;
        VaultGoneError if it does not answer within the limit."""
        peer = self._peers.get(node)
        if peer is None:
            raise VaultGoneError(f"no vault is known on node {node}")
        try:
            return ray.get(getattr(peer, method).remote(*arguments), timeout=limit_s)
        except GetTimeoutError:
            problem = f"did not answer within {limit_s:.0f} s"
        except RayTaskError as error:
            if isinstance(error.cause, RayzeroError):
                raise error.cause from None
            problem = f"failed: {error}"
        except RayError as error:
            problem = f"is gone: {error}"
        raise VaultGoneError(f"the vault on node {node} {problem}")


def process_end_event(worker: int, pid: int, pidfd: int) -> ConnectionLost:
    """Returns the event for the end of a worker's process, which need not be registered here."""
    return ConnectionLost(worker, pid, read_process_end((pidfd,), -1), has_ended=True)
