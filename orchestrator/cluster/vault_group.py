"""The vaults of a job, one on every node with a worker. A vault is a Ray actor, but is called over
its node's stream."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayzero.orchestrator.cluster.head_calls import HeadCalls
from rayzero.orchestrator.cluster.node_links import NodeLink, WorkerMail
from rayzero.orchestrator.cluster.ray_api import ACTOR_LOST, death_cause, wait_gone
from rayzero.orchestrator.cluster.worker_commands import WorkerCommands
from rayzero.orchestrator.errors import JobFailedError, VaultLostError
from rayzero.workers.agent.link import AgentAddress, Attach
from rayzero.workers.chaos.node import network_id
from rayzero.workers.chaos.spec import FaultSpec
from rayzero.workers.lifetimes import NAMESPACE, VAULT, Owned, owned_name
from rayzero.workers.messages import WorkerSpec
from rayzero.workers.vault.actor import VAULT_CALL_THREADS, VaultActor
from rayzero.workers.vault.records import VaultEvent
from rayzero.workers.vault.vault import Vault

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_START_TIMEOUT_S = 60.0
_UNAVAILABLE_PAUSE_S = 1.0


@dataclass(eq=False)
class _NodeVault:
    """A node's vault.

    Args:
        actor: None until the actor is started.
        opening: the task that makes the stream and returns the vault's address. It is not
            cancelled, which would also cancel the callers that await it; it ends when the process
            or the stream does.
        life: waits until Ray reports the end of the process and its cause, and until the vault
            obeys a later controller.
    """

    actor: Any = None
    address: AgentAddress | None = None
    link: NodeLink | None = None
    opening: asyncio.Task[str] = field(init=False)
    life: asyncio.Future[Any] | None = None
    ended: bool = False

    def end(self, cause: str) -> None:
        """Ends the stream and the vault's process."""
        self.ended = True
        if self.life is not None:
            self.life.cancel()
        if self.link is not None:
            self.link.end(VaultLostError(cause))
        if self.actor is not None:  # it may be alive, if Ray could not reach it for a while
            ray.kill(self.actor)


class VaultGroup:
    """One vault for each node; owned from `start` or `open` until `release`. Used from one event
    loop. Calls that name a node may raise VaultLostError.

    A lost vault is removed, so that the next `open` starts another one on its node.

    Args:
        epoch: epoch of this controller's claim. A vault that has seen it obeys no lower one.
        orphan_s: as of `OrphanWatch`, for the vaults and the workers.
        on_fenced: called when a vault obeys a later controller.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        epoch: int = 0,
        orphan_s: float = 0.0,
        on_fenced: Callable[[], object] = lambda: None,
    ) -> None:
        self._spec = spec
        self._on_fenced = on_fenced
        self.orphan_s = orphan_s
        self._faults = spec.faults
        self._attach = Attach(epoch, os.urandom(16))
        self.head = HeadCalls()
        """Calls to the head, also those of the workers' groups."""
        self.mail = WorkerMail()
        """Passes on the messages of workers on nodes with a vault."""
        self.commands = WorkerCommands(self._attach, self._link_of)
        """Sends commands to the same workers."""
        self.mail.on_answer = self.commands.on_answer
        self._actor = ray.remote(VaultActor)
        self._vaults: dict[str, _NodeVault] = {}
        self.attached: tuple[str, ...] = ()
        """Nodes of the vaults that `attach` has taken over."""
        self.last_worker = -1
        """The greatest index of a worker that these vaults have known; -1 if there is none."""
        self._shared_peers: dict[str, Any] = {}
        self.health_limit_s: float | None = None
        """Time limit of the check of its node with which each vault begins; None: no check."""

    async def attach(self, vaults: Iterable[Owned]) -> None:
        """Takes over the vaults that an earlier process of the job has started. Vaults that do not
        answer are ended."""
        for owned in vaults:
            with suppress(ValueError):  # it has ended
                node = owned.what.removeprefix(VAULT).rpartition("-")[0]
                self._begin(node, _NodeVault(owned.actor()))
        opened = [
            asyncio.wait_for(asyncio.shield(vault.opening), _START_TIMEOUT_S)
            for vault in self._vaults.values()
        ]
        replies = await asyncio.gather(*opened, return_exceptions=True)
        for (node, vault), reply in zip([*self._vaults.items()], replies, strict=True):
            if not isinstance(reply, str):
                self._remove(node, vault, "it did not answer")
        self.attached = tuple(self._vaults)
        links = [vault.link for vault in self._vaults.values() if vault.link is not None]
        last_workers = [link.hello.last_worker for link in links if link.hello is not None]
        self.last_worker = max(last_workers, default=-1)

    def start(self, node_id: str) -> None:
        """Starts a vault on a node that has none, without waiting for it."""
        if node_id in self._vaults:
            return
        spec, what = self._spec, f"{VAULT}{node_id}-{secrets.token_hex(4)}"
        options = self._actor.options(
            name=owned_name(spec.name, spec.run, what),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,  # a request that was given up may have been received
            num_cpus=0,
            max_concurrency=VAULT_CALL_THREADS,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        start = partial(
            options.remote,
            spec.name,
            node_id,
            self._faults,
            spec.output_dir,
            self.orphan_s,
            self.health_limit_s,
        )
        self._begin(node_id, _NodeVault(), start)

    def _begin(
        self, node_id: str, vault: _NodeVault, start: Callable[[], Any] | None = None
    ) -> None:
        """Begins to make the stream of a vault, which `start` starts if it does not run yet."""
        self._vaults[node_id] = vault
        vault.opening = asyncio.create_task(self._open_stream(node_id, vault, start))
        vault.opening.add_done_callback(_retrieve)

    async def open(self, node_ids: Sequence[str]) -> dict[str, str]:
        """Starts a vault on each of these nodes that has none. Returns the vaults' addresses by
        node. Raises JobFailedError if a vault did not start."""
        nodes = list(dict.fromkeys(node_ids))
        starts = asyncio.gather(*(self._start_and_wait(node) for node in nodes))
        try:
            addresses = await asyncio.wait_for(starts, _START_TIMEOUT_S)
        except TimeoutError:
            raise JobFailedError(
                f"the vaults' processes did not start within {_START_TIMEOUT_S:g} s, or their TCP"
                f" ports cannot be reached: {self._unreachable()}",
                allowed="one actor with num_cpus=0 on every node of the job, and connections from"
                " the head to any port of these nodes",
                fix="open the ports of net.ipv4.ip_local_port_range to the head",
            ) from None
        await self._share_peers()
        return dict(zip(nodes, addresses, strict=True))

    async def call(self, node_id: str, method: Callable[[Any, *Ts], T], *args: *Ts) -> T:
        """Calls a method of `Vault` in a node's vault. Raises what the method raises;
        VaultLostError if the vault's process or its node is gone."""
        reply: T = await self._of_link(node_id, lambda link: link.call(method.__name__, *args))
        return reply

    async def events(self, node_id: str, limit_s: float) -> list[VaultEvent]:
        """Returns the events on a node since the previous call. Waits until there are some. Raises
        TimeoutError if the vault has given no sign for `limit_s` that it serves its node."""
        events: list[VaultEvent] = await self._of_link(node_id, lambda link: link.events(limit_s))
        return events

    async def ask_all(self, limit_s: float) -> None:
        """Waits until all vaults have answered a call, for at most `limit_s`. `on_fenced` is called
        instead of an answer, if a vault obeys a later controller."""
        calls = [self.call(node, Vault.runs, os.getpid()) for node in self._vaults]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), limit_s)

    async def inject_faults(self, faults: Sequence[FaultSpec]) -> None:
        """Replaces the faults that were injected since the job started, in every vault. Vaults that
        start later get the same faults."""
        in_effect = self._faults = (*self._spec.faults, *faults)
        calls = [self.call(node, VaultActor.inject, in_effect) for node in self._vaults]
        for reply in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(reply, BaseException) and not isinstance(reply, VaultLostError):
                raise reply

    async def why_not_injectable(self, node_id: str, fault: FaultSpec) -> str:
        """Returns why a fault of a vault or a node cannot be injected on this node; an empty string
        if it can."""
        is_local = node_id == ray.get_runtime_context().get_node_id()
        return await self.call(
            node_id, VaultActor.why_not_injectable, fault, is_local, network_id()
        )

    async def inject_node_fault(self, node_id: str, fault: FaultSpec) -> None:
        """Injects a fault of a vault or a node, which usually ends the process that would reply."""
        await self.call(node_id, VaultActor.inject_node_fault, fault)

    async def close(self, node_id: str) -> None:
        """Ends a node's vault, if it has one. Ray's autoscaler keeps a node with a vault alive."""
        vault = self._vaults.pop(node_id, None)
        if vault is not None:
            vault.end("it was closed")
            await _wait_gone([vault])

    async def release(self) -> None:
        """Ends all vaults. May be called at any time, repeatedly."""
        vaults = list(self._vaults.values())
        self._vaults, self._shared_peers = {}, {}
        for vault in vaults:
            vault.end("it was closed")
        await _wait_gone(vaults)

    async def _of_link(self, node_id: str, request: Callable[[NodeLink], Awaitable[Any]]) -> Any:
        vault = self._vaults.get(node_id)
        if vault is None or vault.link is None:
            raise VaultLostError(f"node {node_id} has no vault")
        try:
            return await request(vault.link)
        except VaultLostError as lost:
            self._remove(node_id, vault, str(lost))
            raise

    async def _start_and_wait(self, node_id: str, retry: bool = True) -> str:
        """Returns the address of a node's vault. Starts a lost vault again, once if `retry`."""
        self.start(node_id)
        vault = self._vaults[node_id]
        try:
            return await asyncio.shield(vault.opening)
        except (VaultLostError, *ACTOR_LOST) as lost:
            self._remove(node_id, vault, str(lost))
            if not retry:
                cause = death_cause(lost) if isinstance(lost, RayError) else str(lost)
                raise VaultLostError(cause) from None
            return await self._start_and_wait(node_id, retry=False)
        except RayError as error:
            raise JobFailedError(f"a vault could not start: {death_cause(error)}") from None

    def _link_of(self, node_id: str) -> NodeLink | None:
        vault = self._vaults.get(node_id)
        return None if vault is None else vault.link

    async def _open_stream(
        self, node_id: str, vault: _NodeVault, start: Callable[[], Any] | None
    ) -> str:
        if start is not None:
            vault.actor = await self.head(start)
        if vault.ended:
            ray.kill(vault.actor)
            raise VaultLostError("it was closed")
        vault.address = await vault.actor.open.remote(self._spec.run)
        if vault.ended:
            raise VaultLostError("it was closed")
        on_news = partial(self.commands.on_news, node_id)
        vault.link = NodeLink(vault.address, self._attach, self.mail, on_news)
        self.commands.send_again(node_id)
        vault.life = asyncio.gather(
            self._watch(vault.actor, vault.link), self._await_fence(vault.link)
        )
        vault.life.add_done_callback(_retrieve)
        await vault.link.attached()
        return vault.address.vault

    async def _watch(self, actor: Any, link: NodeLink) -> None:
        """Ends the stream with the cause that Ray knows, once the vault's process has ended."""
        while True:
            try:
                await actor.wait_end.remote(self._attach)
                return  # a later controller watches the vault
            except ActorUnavailableError:  # Ray does not know yet whether it is alive
                await asyncio.sleep(_UNAVAILABLE_PAUSE_S)
            except RayError as error:
                link.end(VaultLostError(death_cause(error)))
                return

    async def _await_fence(self, link: NodeLink) -> None:
        await link.fenced()
        self._on_fenced()

    def _remove(self, node_id: str, vault: _NodeVault, cause: str) -> None:
        if self._vaults.get(node_id) is vault:
            del self._vaults[node_id]
            vault.end(cause)

    def _unreachable(self) -> str:
        """Returns the addresses of vaults that have started, and do not answer, for an error."""
        addresses = [vault.address for vault in self._vaults.values() if not vault.opening.done()]
        shown = [f"{address.host}:{address.port}" for address in addresses if address is not None]
        return ", ".join(shown) or "none"

    async def _share_peers(self) -> None:
        """Gives every vault the handles of all others, if they have changed since the last time."""
        actors = {
            node: vault.actor for node, vault in self._vaults.items() if vault.actor is not None
        }
        if actors == self._shared_peers:
            return
        calls = []
        for node, actor in actors.items():
            peers = {peer: handle for peer, handle in actors.items() if peer != node}
            calls.append(actor.set_peers.remote(peers))
        try:
            await asyncio.wait_for(asyncio.gather(*calls), _START_TIMEOUT_S)
        except TimeoutError:
            text = f"a vault did not take the others' addresses within {_START_TIMEOUT_S:g} s"
            raise VaultLostError(text) from None
        except ACTOR_LOST as error:
            raise VaultLostError(death_cause(error)) from None
        self._shared_peers = actors


async def _wait_gone(vaults: Iterable[_NodeVault]) -> None:
    await wait_gone(vault.actor.usage for vault in vaults if vault.actor is not None)


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Retrieves a future's error, so that asyncio does not log it as unhandled. Callers that await
    the future get the error, too."""
    if not done.cancelled():
        done.exception()
