"""The collectives that a training function calls itself, in a job whose ranks change.

The members of a generation meet where a training step begins. A survivor comes there from within
its loop, a new member from the function's start. A new member therefore calls the function's
collectives before the first step without its peers. Each returns what the same call returned when
the function ran for the first time; those results are part of the training state. The same holds
for the collectives that a launched script calls between its epochs (`epoch_calls`). Collectives
that the new member calls in addition complete on this rank alone. So do the collectives that a
survivor calls after its group broke. Between the epochs of a script such a call raises instead:
ranks decide by its result, such as a metric, so the script is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.comm.elastic_group import CallHost
from rayzero.engine.device import get_device
from rayzero.engine.errors import ConfigError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.recut import GroupSurvival
from rayzero.engine.state.registry import StateRegistry, read_value
from rayzero.workers.epoch_calls import EpochReplay, ScriptPhase
from rayzero.workers.job_engines import JobEngines
from rayzero.workers.process_group import is_collective_failure

_STATE = "rayzero.collectives"
_NOT_JOINED = "this rank had not begun its first step, where the others wait for it"
_OF_ONE_RANK = ("gather", "scatter", "reduce", "reduce_scatter", "alltoall", "all_to_all", "recv")
"""Prefixes of the names of collectives whose results differ from rank to rank."""


def read_calls(source: StateSource, rank: int) -> dict[str, Any] | None:
    """Reads from a state the collectives that the function called before its first step, with their
    results; None if the function could not outlive its generation."""
    calls: dict[str, Any] | None = read_value(source, rank, _STATE)
    return calls


class FunctionCollectives(CallHost):
    """The `CallHost` of one call of a training function. Used by any of the function's threads.

    Args:
        rank: this rank at the time of the call.
        is_generation_ended: returns whether the present generation has ended.
        read_calls: passed on a new member whose peers stay in their loops. Waits for the state that
            the member starts from, and returns `read_calls` of it.

    Attributes:
        survival: the engines, if they outlive their generations; otherwise None.
        has_begun: whether the function's first step has begun.
    """

    def __init__(
        self,
        rank: int,
        is_generation_ended: Callable[[], bool],
        read_calls: Callable[[], dict[str, Any] | None] | None = None,
    ) -> None:
        self.survival: JobEngines | None = None
        self.has_begun = False
        self._engines: JobEngines | None = None  # built before the first step
        self._engine_called = 0  # collectives that the engines had called when they became ready
        self._is_generation_ended = is_generation_ended
        self._rank = rank
        self._calls: dict[str, Any] = {"rank": rank, "results": []}
        self._read_calls = read_calls
        self._is_member = read_calls is None
        self._before_first_step = True
        self._replayed = self._checked = 0
        self._has_groups = False
        self._epochs = EpochReplay(StateRegistry(), self._phase)
        self._is_resumed: Callable[[], bool] = lambda: False

    def follow_epochs(
        self,
        registry: StateRegistry,
        is_resumed: Callable[[], bool],
        read_notes: Callable[[], bytes],
    ) -> EpochReplay:
        """Returns the object to notify where a script's epochs begin and end.

        Args:
            is_resumed: returns whether the function began with finished steps, as on all ranks.
            registry, read_notes: as in `EpochReplay`.
        """
        self._is_resumed = is_resumed
        self._epochs = EpochReplay(registry, self._phase, read_notes)
        return self._epochs

    def _phase(self) -> ScriptPhase:
        if not self._is_member:
            return ScriptPhase.JOINING
        is_resuming = not self.has_begun and self._is_resumed()
        return ScriptPhase.RESUMING if is_resuming else ScriptPhase.TRAINING

    def engine_is_ready(self, engines: JobEngines, survival: GroupSurvival) -> None:
        """Called when the function has built an engine; does nothing after its first step began."""
        if self.has_begun:
            return
        self._engines = engines
        self._read_first_calls()
        self._engine_called += survival.collectives_called

    def begin_step(self) -> bool:
        """Called where a training step begins. Returns False after the first step. In the first
        step, from which on all ranks make the same calls, returns whether the engines may outlive
        their group. They may not if an engine has gathered weights before, or the function has
        created groups: a new member would find no peers for that."""
        self._epochs.begin_step()
        if self.has_begun or self._engines is None:
            return False
        self.has_begun, self._before_first_step = True, False
        self._is_member = True
        return not self._has_groups and self._engines.collectives_called == self._engine_called

    @property
    def is_ahead_of_peers(self) -> bool:
        """Whether this is a new member, whose function has not yet begun the step where its peers
        wait."""
        return not self._is_member

    def check_model(self, checksum: int) -> None:
        """Keeps the checksum of a model that only evaluates. Raises ConfigError on a new member
        whose model differs from that of its peers."""
        if self._is_member:
            self._calls.setdefault("models", []).append(checksum)
            return
        self._read_first_calls()
        models, number = self._calls.get("models", []), self._checked
        self._checked += 1
        if number >= len(models) or models[number] != checksum:
            raise ConfigError(
                f"model {number + 1} of those that only evaluate has other weights on the new rank "
                f"{self._rank} than on the others",
                allowed="the same weights in every call of the training function",
                fix="read them from a file, or set a seed before the model is made",
            )

    def outlive(self, registry: StateRegistry) -> None:
        """Called when the function outlives its generations from now on. Keeps the results of its
        calls with the training state, for later new members."""
        self.survival = self._engines
        registry.register(_STATE, lambda: self._calls, lambda _: None)

    def _read_first_calls(self) -> None:
        read, self._read_calls = self._read_calls, None
        if read is not None and (calls := read()) is not None:
            self._calls = calls

    def local_reason(self) -> str:
        if not self._is_member:
            return _NOT_JOINED
        survival = self.survival
        return survival.local_reason if survival is not None and survival.is_enabled else ""

    def repeats(self) -> bool:
        return self._is_member and self._epochs.is_known

    def replays(self, name: str, outputs: Sequence[Tensor]) -> bool:
        if self._epochs.is_open:
            return self._epochs.replays(name, outputs) or not (self._is_member or outputs)
        if self._is_member or not outputs:
            return not self._is_member  # of a new member's barrier: its peers have passed it
        self._read_first_calls()
        results = self._calls["results"]
        if self._replayed >= len(results):
            return False
        recorded, tensors = results[self._replayed]
        shapes = [tensor.shape for tensor in tensors]
        is_same = recorded == name and shapes == [output.shape for output in outputs]
        if not is_same or (name.startswith(_OF_ONE_RANK) and self._calls["rank"] != self._rank):
            self._replayed = len(results)  # the function takes another course than in its first run
            return False
        self._replayed += 1
        for output, tensor in zip(outputs, tensors, strict=True):
            output.copy_(tensor)
        return True

    def records(self) -> bool:
        if self._epochs.is_agreeing or self._epochs.is_open:
            return self._epochs.records
        return self._before_first_step and self._is_member

    def record(self, name: str, outputs: Sequence[Tensor]) -> None:
        if self._epochs.records:
            self._epochs.record(name, () if name.startswith(_OF_ONE_RANK) else outputs)
            return
        if not outputs:
            return
        tensors = [get_device(output.device).to_host(output.detach()).clone() for output in outputs]
        self._calls["results"].append((name, tensors))

    def requires_peers(self, outputs: Sequence[Tensor]) -> bool:
        # A barrier has no outputs. A new member's peers are in their loops.
        return bool(outputs) and self._is_member and self._epochs.is_open

    def makes_group(self) -> None:
        self._has_groups = True

    def outlives(self, error: Exception) -> bool:
        survival = self.survival
        if survival is None or not survival.is_enabled:
            return False
        if not (self._is_generation_ended() or is_collective_failure(error)):
            return False
        self._epochs.forget()
        survival.break_group(f"a collective of the training function failed: {error}")
        return True


_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum_of_model(model: nn.Module) -> int:
    """Returns a number that differs if a weight or a buffer does. Makes one small copy from the
    device for each tensor."""
    total = 0
    for tensor in (*model.parameters(), *model.buffers()):
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        bits = flat.view(_INTEGER_OF_SIZE.get(tensor.element_size(), torch.uint8))
        (added,) = get_device(bits.device).read(bits.sum(dtype=torch.int64).reshape(1))
        total = (total * 31 + int(added)) % 2**53
    return total
