"""The collectives that a training function calls itself, in a job whose ranks change.

The members of a generation meet where a training step begins. A survivor comes there from within
its loop, a new member from the function's start. So a new member calls what the function does
before its first step when its peers do not: it gets what the same call returned when the function
ran for the first time, which is part of the training state. The same holds for what a launched
script calls between its epochs (`epoch_calls`). What a new member calls in addition completes on
it alone; and so does what a survivor calls after its group broke.
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
"""Beginnings of the names of collectives whose results differ from rank to rank."""


def read_calls(source: StateSource, rank: int) -> dict[str, Any] | None:
    """Reads the collectives that a function called before its first step, with their results; None
    if the function has not outlived its generations."""
    calls: dict[str, Any] | None = read_value(source, rank, _STATE)
    return calls


class FunctionCollectives(CallHost):
    """The host of one call of a training function. Used by any of the function's threads.

    Args:
        rank: this rank, when the function is called.
        is_generation_ended: whether the present generation has ended.
        read_calls: of a new member, whose peers stay in their loops: `read_calls` of the state that
            it starts from, for which it may wait.

    Attributes:
        survival: of the engines, if they outlive their generations.
        has_begun: whether the first step has.
    """

    def __init__(
        self,
        rank: int,
        is_generation_ended: Callable[[], bool],
        read_calls: Callable[[], dict[str, Any] | None] | None = None,
    ) -> None:
        self.survival: JobEngines | None = None
        self.has_begun = False
        self._engines: JobEngines | None = None  # until the first step
        self._engine_called = 0  # collectives, until each was ready
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

    def follow_epochs(self, registry: StateRegistry, is_resumed: Callable[[], bool]) -> EpochReplay:
        """Returns what is to be told where a script's epochs begin and end.

        Args:
            registry: makes the results of the calls between them part of the training state.
            is_resumed: whether the job had finished steps when the function was called.
        """
        self._is_resumed = is_resumed
        self._epochs = EpochReplay(registry, self._phase)
        return self._epochs

    def _phase(self) -> ScriptPhase:
        if not self._is_member:
            return ScriptPhase.JOINING
        is_resuming = not self.has_begun and self._is_resumed()
        return ScriptPhase.RESUMING if is_resuming else ScriptPhase.TRAINING

    def engine_is_ready(self, engines: JobEngines, survival: GroupSurvival) -> None:
        """The function has built an engine, before its first step."""
        if self.has_begun:
            return
        self._engines = engines
        self._read_first_calls()
        self._engine_called += survival.collectives_called

    def begin_step(self) -> bool:
        """Called where a training step begins. In the first one, from which on all ranks make the
        same calls, returns whether the engines may outlive their group: not if one has gathered
        weights before, or the function has made groups, for which a new member would find no
        peers."""
        self._epochs.begin_step()
        if self.has_begun or self._engines is None:
            return False
        self.has_begun, self._before_first_step = True, False
        self._is_member = True
        return not self._has_groups and self._engines.collectives_called == self._engine_called

    @property
    def is_ahead_of_peers(self) -> bool:
        """Whether the function of a new member has not come to where the others are."""
        return not self._is_member

    def check_model(self, checksum: int) -> None:
        """Keeps the checksum of a model that only evaluates. Raises ConfigError on a new member
        that has built another one than its peers."""
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
        """The function outlives its generations. The results of its calls are kept for later new
        members, with the training state."""
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
            return not self._is_member  # a barrier: the others are past it
        self._read_first_calls()
        results = self._calls["results"]
        if self._replayed >= len(results):
            return False
        recorded, tensors = results[self._replayed]
        is_same = recorded == name and [it.shape for it in tensors] == [it.shape for it in outputs]
        if not is_same or (name.startswith(_OF_ONE_RANK) and self._calls["rank"] != self._rank):
            self._replayed = len(results)  # it does something else than when it ran first
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
        tensors = [get_device(it.device).to_host(it.detach()).clone() for it in outputs]
        self._calls["results"].append((name, tensors))

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
    """A number that differs where a weight or a buffer does. One small copy from the device for
    each tensor."""
    total = 0
    for tensor in (*model.parameters(), *model.buffers()):
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        bits = flat.view(_INTEGER_OF_SIZE.get(tensor.element_size(), torch.uint8))
        (added,) = get_device(bits.device).read(bits.sum(dtype=torch.int64).reshape(1))
        total = (total * 31 + int(added)) % 2**53
    return total
