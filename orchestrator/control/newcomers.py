"""Calls the training functions of new workers before their generation begins.

What a function does before it trains (imports, its model, its data) takes seconds, which the other
ranks would wait for. So it is called while they train, with the rank that it is going to have, and
waits where it needs the training state or the other ranks. Then they are drained.
"""

from __future__ import annotations

from collections.abc import Iterable

from rayzero.orchestrator.control.context import JobContext
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.policies.placement import CallState, FunctionCall, misplaced
from rayzero.workers.messages import GenerationSpec


class Newcomers:
    """Prepares the workers that a resize would add."""

    def __init__(self, context: JobContext, failures: FailureHandler) -> None:
        self._context = context
        self._failures = failures

    async def prepare(self) -> bool:
        """Calls the functions of the selected workers that are new, and waits for them up to
        `workers.start_timeout_s`. Returns whether all of them can begin the next generation; if
        not, others may be selected now."""
        ctx, registry = self._context, self._context.registry
        selection, generation = registry.select_members(), ctx.generation
        if selection is None or selection.indices.isdisjoint(generation.assignments):
            return True  # no function continues, so that all of them begin at once
        places = ctx.assign(selection)
        if others := [it for it in misplaced(places, registry.calls) if registry.is_ahead(it)]:
            self._failures.retire(others)
            return False
        if new := {worker: it for worker, it in places.items() if worker not in registry.calls}:
            spec = GenerationSpec(
                generation=generation.number + 1,
                world_size=len(places),
                store_host="",
                store_port=0,
                faults=ctx.injected_faults,
                survivors_stay=True,
                parts=registry.limits.parts,
                is_ahead=True,
            )
            state, ranks = CallState.PREPARING, len(places)
            registry.calls = registry.calls | {
                worker: FunctionCall(place.rank, ranks, spec.generation, state)
                for worker, place in new.items()
            }
            ctx.expect_replies(ctx.deps.workers.assign(spec, new))
            selection = registry.select_members()
        ahead = [worker for worker in places if registry.is_ahead(worker)]

        def is_over() -> bool:
            changed = ctx.generation is not generation or not ctx.is_running
            return changed or registry.select_members() != selection or not self._preparing(ahead)

        limit_s = ctx.plan.spec.workers.start_timeout_s
        if not await ctx.wait_for(limit_s, is_over):
            for worker in self._preparing(ahead):
                self._failures.on_newcomer_late(worker, limit_s)
            return False
        same = ctx.generation is generation and registry.select_members() == selection
        return same and not self._preparing(ahead)

    def _preparing(self, ahead: Iterable[int]) -> list[int]:
        registry = self._context.registry
        alive = filter(registry.is_alive, ahead)
        return [it for it in alive if registry.calls[it].state is CallState.PREPARING]
