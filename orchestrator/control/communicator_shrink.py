"""Decides whether survivors shrink their communicator, or abort it and make another.

They shrink it if ranks just go: the members of the next generation, as known when the fault is
decided, are the survivors in their order. All get the same list of lost ranks. The communicator is
used if the next generation's members turn out to be these, and all have said that they have it. If
one fails, the others stop waiting for it, all make a new one, and the job does not try again.
"""

from __future__ import annotations

from rayzero.orchestrator.control.context import JobContext
from rayzero.orchestrator.policies.placement import assign_ranks
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.messages import Shrunk


class CommunicatorShrink:
    """One job's. At most one attempt in each generation."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._enabled = context.plan.spec.recovery.communicator_shrink
        self._generation = 0
        """Of the last attempt."""
        self._survivors: tuple[int, ...] = ()
        """Its workers, in the order of the ranks."""
        self._shrunk: set[int] = set()

    def begin(self) -> tuple[int, ...]:
        """The ranks that the fenced generation's communicator is to be shrunk by; none if it is to
        be aborted, also because a further rank was lost since the first call."""
        ctx, generation = self._context, self._context.generation
        if not (self._enabled and generation.all_joined and self._generation < generation.number):
            return ()
        selection = ctx.registry.select_members()
        survivors = tuple(filter(ctx.registry.is_alive, generation.assignments))
        if selection is None or survivors != tuple(assign_ranks(selection.members, {})):
            return ()
        if not 1 < len(survivors) < generation.world_size:
            return ()
        if not generation.active.issuperset(survivors):
            return ()
        self._generation, self._survivors, self._shrunk = generation.number, survivors, set()
        ranks = generation.assignments.items()
        return tuple(member.rank for worker, member in ranks if worker not in survivors)

    def on_shrunk(self, worker: int, message: Shrunk) -> None:
        """A worker's attempt is over."""
        ctx, generation = self._context, self._context.generation
        if message.generation != self._generation or generation.number != self._generation:
            return
        if not message.error:
            self._shrunk.add(worker)
        elif self._enabled and all(map(ctx.registry.is_alive, self._survivors)):
            self._enabled = False
            ctx.warn(
                f"rank {message.rank} could not shrink its communicator: {message.error:.500}; "
                "a new one is made, and the job does not try again (recovery.communicator_shrink)"
            )
            ctx.broadcast(generation.active, WorkerCalls.fence, generation.number)

    def made(self, members: tuple[int, ...]) -> bool:
        """Whether these workers, in the order of their ranks, have a communicator, to which that of
        the generation that ends was shrunk."""
        has_it = self._shrunk.issuperset(members) and members == self._survivors
        return has_it and self._generation == self._context.generation.number
