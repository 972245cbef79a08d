"""New workers, whose training functions are called before their generation begins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.chaos import ClusterFaultInjector
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.loop import JobLoop, JobMachine
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.policies.placement import (
    IS_MISPLACED,
    CallState,
    FunctionCall,
    misplaced,
)
from rayzero.workers.messages import GenerationSpec

if TYPE_CHECKING:  # it imports Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.worker_group import WorkerGroup


@dataclass(eq=False)
class Newcomers:
    """Lets new workers build their models and engines while the others train.

    Args:
        _start_timeout_s: `workers.start_timeout_s`.
        _rollout_group: see `GenerationSpec`.
    """

    _loop: JobLoop
    _machine: JobMachine
    _members: Members
    _calls: Calls
    _workers: WorkerGroup
    _failures: FailureHandler
    _injector: ClusterFaultInjector
    _start_timeout_s: float
    _rollout_group: int

    async def prepare(self) -> bool:
        """Calls the functions of new workers among the selected ones, before their generation
        begins, and waits for them up to `workers.start_timeout_s`. Returns whether all of them can
        begin it; if not, other workers may be selected now.

        What a function does before it trains (imports, its model, its data) takes seconds, which
        the other ranks would wait for. So the function is called while they train, with its future
        rank, and waits where it needs the training state or the other ranks. Then the other ranks
        are drained.
        """
        registry = self._members.registry
        selection, generation = registry.select_members(), self._members.generation
        if selection is None or selection.indices.isdisjoint(generation.assignments):
            return True  # no function continues, so that all of them begin at once
        places = self._members.assign(selection)
        wrong = [w for w in misplaced(places, registry.calls) if registry.is_ahead(w)]
        if wrong:
            self._failures.retire(wrong, IS_MISPLACED)
            return False
        new = {worker: place for worker, place in places.items() if worker not in registry.calls}
        if new:
            spec = GenerationSpec(
                generation=generation.number + 1,
                world_size=len(places),
                store_host="",
                store_port=0,
                faults=self._injector.injected,
                survivors_stay=True,
                parts=registry.limits.parts,
                is_ahead=True,
                rollout_group=self._rollout_group,
            )
            state, ranks = CallState.PREPARING, len(places)
            registry.calls = registry.calls | {
                worker: FunctionCall(place.rank, ranks, spec.generation, state)
                for worker, place in new.items()
            }
            self._calls.expect(self._workers.assign(spec, new))
            selection = registry.select_members()
        ahead = [worker for worker in places if registry.is_ahead(worker)]

        def is_over() -> bool:
            trains = self._members.generation is generation and self._machine.is_running
            return (
                not trains or registry.select_members() != selection or not self._preparing(ahead)
            )

        limit_s = self._start_timeout_s
        if not await self._loop.wait_for(limit_s, is_over):
            late = f"the training function did not come to its engine within {limit_s:g} s"
            for worker in self._preparing(ahead):
                self._failures.on_newcomer_failed(worker, f"{late} (workers.start_timeout_s)")
            return False
        same = self._members.generation is generation and registry.select_members() == selection
        return same and not self._preparing(ahead)

    def _preparing(self, ahead: Iterable[int]) -> list[int]:
        registry = self._members.registry
        alive = filter(registry.is_alive, ahead)
        return [worker for worker in alive if registry.calls[worker].state is CallState.PREPARING]
