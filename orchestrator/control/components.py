"""The components of a controller, each made from what it uses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.checkpoint_store import CheckpointStore
from rayzero.orchestrator.control.calls import Calls, WorkerUnavailableError
from rayzero.orchestrator.control.chaos import ClusterFaultInjector
from rayzero.orchestrator.control.checkpoint_pins import CheckpointPins
from rayzero.orchestrator.control.checkpoints import CheckpointWriter
from rayzero.orchestrator.control.completion import JobCompletion
from rayzero.orchestrator.control.dispatcher import MessageDispatcher
from rayzero.orchestrator.control.elastic import ElasticScaler
from rayzero.orchestrator.control.failures import FailureHandler, Kills
from rayzero.orchestrator.control.generation import GenerationNumbers
from rayzero.orchestrator.control.hang_detector import HangDetector
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.control.job_stop import JobStop
from rayzero.orchestrator.control.loop import JobLoop, JobMachine
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.newcomers import Newcomers
from rayzero.orchestrator.control.node_health import NodeHealth
from rayzero.orchestrator.control.reattachment import Reattachment
from rayzero.orchestrator.control.reconfigure import MemberSelection, Reconfiguration, Rendezvous
from rayzero.orchestrator.control.recovery_timer import RecoveryTimer
from rayzero.orchestrator.control.replacements import Replacements
from rayzero.orchestrator.control.restore import RestoreSelector
from rayzero.orchestrator.control.role_worker import RoleViews
from rayzero.orchestrator.control.roles import RolePools
from rayzero.orchestrator.control.rollouts import RolloutBuffer
from rayzero.orchestrator.control.steps import StepReports
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.control.weight_versions import WeightVersions
from rayzero.orchestrator.errors import internal_error
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.machine import FaultFatal
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.balance import Balancer
from rayzero.orchestrator.policies.failure import FaultBudget
from rayzero.orchestrator.policies.membership import WorkerLimits
from rayzero.orchestrator.policies.usefulness import LastRun
from rayzero.orchestrator.progress import JobProgress
from rayzero.orchestrator.rollout_plan import rollout_stages
from rayzero.workers.vault.process_end import ProcessEnd

if TYPE_CHECKING:  # they import Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.vault_group import VaultGroup
    from rayzero.orchestrator.cluster.worker_group import WorkerGroup


@dataclass(frozen=True)
class Dependencies:
    """Everything outside the controller; tests pass fakes."""

    workers: WorkerGroup
    vaults: VaultGroup
    checkpoint_store: CheckpointStore
    events: EventBus
    clock: Clock
    flush_journal: Callable[[float], Awaitable[bool]]
    """Waits up to so many seconds until all events so far are durable in the journal; returns
    whether they are."""
    role_groups: Mapping[str, WorkerGroup] = field(default_factory=dict)
    """The workers of each role, by its name."""


class Components:
    """Makes and connects the controller's components. Attributes are those that the controller
    uses."""

    def __init__(self, plan: JobPlan, deps: Dependencies, last: LastRun | None) -> None:
        """
        Args:
            last: the last run, if it has ended.
        """
        recovery, patience_s = plan.spec.recovery, plan.worker_spec.patience_s
        events, workers, groups = deps.events, deps.workers, deps.vaults
        loop = self.loop = JobLoop(deps.clock, self._on_task_error)
        least, spec = plan.resources.min_workers, plan.spec.workers
        limits = WorkerLimits(least, spec.most, spec.spares)
        members = self.members = Members(limits, recovery.replicas, loop.changed.notify)
        machine = self.machine = JobMachine(members, loop.changed.notify)
        progress = self.progress = JobProgress()
        timer = RecoveryTimer(loop.now_s)
        calls = Calls(loop, workers, groups, patience_s)
        budget = FaultBudget(recovery.max_faults, recovery.fault_window_s)
        kills = Kills(loop, calls, workers)
        failures = self.failures = FailureHandler(
            budget, loop, machine, members, kills, events, progress, timer
        )
        vaults = self.vaults = VaultManager(
            loop, members, calls, groups, events, patience_s, self._on_process_died
        )
        versions = self._build_roles(plan, deps, calls)
        injector = self.injector = ClusterFaultInjector(
            plan, loop, members, calls, groups, events, progress, self.roles
        )
        committed = injector.on_checkpoint_committed
        checkpoints = self.checkpoints = CheckpointWriter(
            plan, loop, groups, deps.checkpoint_store, events, progress, committed
        )
        pins = CheckpointPins(loop, members, calls, checkpoints)
        restore = RestoreSelector(
            members, calls, events, progress, timer, patience_s, failures, vaults, checkpoints
        )
        # The last run says nothing about a run from another checkpoint.
        past = last if plan.spec.checkpoint.resume == "auto" else None
        self.completion = JobCompletion(
            plan, loop, machine, members, events, progress, pins, checkpoints, restore, past
        )
        steps = StepReports(
            loop,
            members,
            events,
            progress,
            timer,
            pins,
            vaults,
            versions,
            injector,
            calls,
            Balancer(enabled=recovery.balance == "auto"),
        )
        found = self._build_inbox(plan, deps, timer, steps, pins, versions, restore)
        self._build_generations(plan, deps, calls, timer, steps, restore, found)
        self._build_scaling(plan, deps, calls)

    def _build_roles(self, plan: JobPlan, deps: Dependencies, calls: Calls) -> WeightVersions:
        """Makes the roles, their rollouts, and the record of new weights."""
        loop, machine, members = self.loop, self.machine, self.members
        events, groups, vaults = deps.events, deps.vaults, self.vaults
        versions = WeightVersions(members, loop.changed.notify, bool(plan.roles))
        rollouts = RolloutBuffer(
            plan.rollouts,
            tuple(rollout_stages(plan.spec)),
            loop,
            members,
            calls,
            vaults,
            self.failures,
            versions,
            events,
            plan.worker_spec.patience_s,
        )
        views = RoleViews(loop, members, rollouts, versions)
        roles = [(role, deps.role_groups[role.name]) for role in plan.roles]
        self.roles = RolePools(roles, groups, events, loop, machine, members, vaults, views)
        return versions

    def _build_inbox(
        self,
        plan: JobPlan,
        deps: Dependencies,
        timer: RecoveryTimer,
        steps: StepReports,
        pins: CheckpointPins,
        versions: WeightVersions,
        restore: RestoreSelector,
    ) -> Reattachment:
        """Makes the components that the ranks' messages pass through."""
        loop, members, failures = self.loop, self.members, self.failures
        patience_s = plan.worker_spec.patience_s
        dispatcher = MessageDispatcher(
            loop,
            members,
            deps.events,
            self.progress,
            timer,
            steps,
            failures,
            pins,
            versions,
            restore.rewind,
            self.completion.begin,
        )
        dispatch, on_lost = dispatcher.dispatch, failures.on_worker_lost
        self.inbox = WorkerInbox(loop, members, deps.workers, patience_s, dispatch, on_lost)
        self.vaults.on_stalled = self.inbox.on_stalled
        return Reattachment(
            plan,
            loop,
            members,
            deps.events,
            deps.workers,
            steps,
            failures,
            self.vaults,
            self.inbox,
            dispatcher,
            pins,
            self.checkpoints,
            versions,
            self.roles,
        )

    def _build_generations(
        self,
        plan: JobPlan,
        deps: Dependencies,
        calls: Calls,
        timer: RecoveryTimer,
        steps: StepReports,
        restore: RestoreSelector,
        reattachment: Reattachment,
    ) -> None:
        """Makes the components that form generations, and end them."""
        events, workers = deps.events, deps.workers
        loop, machine, members = self.loop, self.machine, self.members
        failures, vaults = self.failures, self.vaults
        numbers = GenerationNumbers(events, deps.flush_journal, deps.clock, plan.disk_limit_s)
        rendezvous = Rendezvous(
            loop,
            members,
            calls,
            workers,
            events,
            numbers,
            steps,
            self.injector,
            self.inbox,
            vaults,
            self.roles.rollouts,
        )
        selection = MemberSelection(loop, members, events, failures, plan.resources.timeout_s)
        self.reconfiguration = Reconfiguration(
            loop,
            machine,
            members,
            calls,
            timer,
            failures,
            restore,
            vaults,
            selection,
            self.roles.rollouts,
            rendezvous,
            reattachment,
        )
        self.stop = JobStop(
            plan, loop, machine, members, calls, rendezvous, vaults, self.checkpoints
        )

    def _build_scaling(self, plan: JobPlan, deps: Dependencies, calls: Calls) -> None:
        """Makes the components that watch generations, and change their sizes."""
        events, workers = deps.events, deps.workers
        loop, machine, members = self.loop, self.machine, self.members
        failures, vaults, injector = self.failures, self.vaults, self.injector
        start_timeout_s, inbox = plan.spec.workers.start_timeout_s, self.inbox
        self.hang_detector = HangDetector(
            plan, loop, machine, members, calls, events, inbox, failures
        )
        health = NodeHealth(plan.spec.health, loop, members, calls, deps.vaults, events)
        newcomers = Newcomers(
            loop,
            machine,
            members,
            calls,
            workers,
            failures,
            injector,
            start_timeout_s,
            self.roles.rollouts.group,
        )
        replacements = Replacements(
            plan,
            loop,
            machine,
            members,
            calls,
            workers,
            events,
            self.progress,
            failures,
            health,
        )
        self.scaler = ElasticScaler(
            loop,
            machine,
            members,
            workers,
            events,
            vaults,
            inbox,
            newcomers,
            replacements,
            health,
        )

    def _on_process_died(self, worker: int, end: ProcessEnd) -> None:
        """Handles the end of a worker's process, which a vault saw. The worker's earlier messages
        are dispatched first."""
        self.inbox.deliver(worker)
        self.failures.on_worker_lost(worker, end.status, end.stack)

    def _on_task_error(self, error: Exception) -> None:
        """Turns every error of a background task into an event."""
        if isinstance(error, WorkerUnavailableError):
            self.failures.on_worker_lost(error.worker, error.cause)
        elif isinstance(error, RayzeroError):
            self.machine.post(FaultFatal(error))
        else:
            self.machine.post(FaultFatal(internal_error(error)))
