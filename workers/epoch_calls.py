"""Keeps the results of the collectives that a launched script calls between its epochs.

A script in a new process begins again. Its loop yields nothing in finished epochs, but the script
runs what follows each of them, such as an evaluation, with the weights of a later step. With the
results of the first time, its metrics, its choice of the best weights and its early stopping are
those of the other ranks. So is the order of the epoch that it continues, if a library agrees on
that with all ranks, as Accelerate does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from safetensors.torch import load, save
from torch import Tensor

from rayzero.engine.comm.process_group import all_gather_objects
from rayzero.engine.device import get_device
from rayzero.engine.session import ScriptEpochs
from rayzero.engine.state.registry import StateRegistry

_STATE = "rayzero.epoch_calls"
log = logging.getLogger("rayzero.workers")

MAX_BYTES = 4 << 20
"""All results together: they are part of the training state, which is copied at each step."""

NOTES_PREFIX = b"epoch calls:"
"""The beginning of an `EpochReplay`'s notes: Trainer's adapter has others."""
_MAX_NOTES_BYTES = 64 << 10
"""They pass through the job's process."""
_TOO_LARGE = (
    "the collectives that the script calls between its epochs return more than %d MiB: not all are"
    " kept, and a new worker may get other results after finished epochs"
)


@dataclass(frozen=True)
class EpochCall:
    """A collective and its results.

    Attributes:
        tensors: in host memory; empty if the results were not kept.
    """

    name: str
    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class ScriptPhase(Enum):
    """The position of a script's process relative to the other ranks."""

    RESUMING = "all ranks have begun the script in a job that has finished steps"
    JOINING = "its peers are in their loops, where it will come"
    TRAINING = "it is in its loop, with its peers"


class EpochCalls:
    """Calls and their results by point, a place in the script. Used by the training thread."""

    def __init__(self) -> None:
        self._calls: dict[int, list[EpochCall]] = {}
        self._bytes = 0
        self._has_warned = False
        self._encoded: Tensor | None = None

    def __contains__(self, point: int) -> bool:
        return point in self._calls

    def begin(self, point: int) -> None:
        """Keeps the calls that are added at this point."""
        self.drop(point)
        self._calls[point] = []

    def get(self, point: int, index: int) -> EpochCall | None:
        calls = self._calls.get(point, [])
        return calls[index] if index < len(calls) else None

    def add(self, point: int, name: str, outputs: Sequence[Tensor]) -> None:
        """Adds a call, if calls are kept at this point. Waits for results on a GPU."""
        if point not in self._calls:
            return
        if self._bytes + sum(output.nbytes for output in outputs) > MAX_BYTES:
            self.drop(point)
            if not self._has_warned:
                self._has_warned = True
                log.warning(_TOO_LARGE, MAX_BYTES >> 20)
            return
        tensors = [get_device(output.device).to_host(output.detach()).clone() for output in outputs]
        self._append(point, EpochCall(name, tensors))

    def drop(self, point: int) -> None:
        """Forgets the calls at a point."""
        for call in self._calls.pop(point, []):
            self._bytes -= call.nbytes
        self._encoded = None

    def _append(self, point: int, call: EpochCall) -> None:
        self._calls.setdefault(point, []).append(call)
        self._bytes += call.nbytes
        self._encoded = None

    def encode(self) -> Tensor:
        """Returns the calls as bytes, for `load`."""
        if self._encoded is None:
            encoded = bytearray(_encode(self._calls))
            self._encoded = torch.frombuffer(encoded, dtype=torch.uint8)
        return self._encoded

    def encode_points(self, points: Iterable[int]) -> bytes:
        """Returns the calls at some points as bytes, for `load_bytes`; empty if there are none."""
        calls = {point: self._calls[point] for point in points if self._calls.get(point)}
        return _encode(calls) if calls else b""

    def load(self, encoded: Tensor) -> None:
        """Takes the calls that another process has encoded, at points that are not known yet."""
        self.load_bytes(encoded.numpy().tobytes())

    def load_bytes(self, encoded: bytes) -> None:
        known = set(self._calls)
        results: dict[tuple[int, int, str], dict[int, Tensor]] = {}
        for key, tensor in load(encoded).items():
            point, index, name, number = key.split("/")
            results.setdefault((int(point), int(index), name), {})[int(number)] = tensor
        for (called_at, _, name), outputs in sorted(results.items()):
            if called_at in known:
                continue
            ordered = [outputs[number] for number in sorted(outputs)]
            tensors = [] if ordered[0].shape == (0,) else ordered
            self._append(called_at, EpochCall(name, tensors))


def _encode(calls: dict[int, list[EpochCall]]) -> bytes:
    tensors = {
        f"{point}/{index}/{call.name}/{number}": tensor
        for point, calls_at in calls.items()
        for index, call in enumerate(calls_at)
        for number, tensor in enumerate(call.tensors or [torch.empty(0)])
    }
    return save(tensors)


class EpochReplay(ScriptEpochs):
    """Keeps what a script calls between its epochs, and repeats it in a new process. Used by the
    training thread.

    There are two points for the n-th epoch: 2 * n from its beginning to its first step, and
    2 * n + 1 after it.

    Args:
        registry: makes the results part of the training state.
        phase: returns the script's phase.
        read_notes: returns the `notes` of a rank whose script had continued after the state's step;
            empty if there are none.

    Attributes:
        is_open: whether the script is after an epoch, or before the first step of one.
        is_known: whether the calls that follow were made before.
        is_agreeing: whether the ranks are agreeing on that.
    """

    def __init__(
        self,
        registry: StateRegistry,
        phase: Callable[[], ScriptPhase],
        read_notes: Callable[[], bytes] = bytes,
    ) -> None:
        self.is_open = self.is_known = self.is_agreeing = False
        self._registry = registry
        self._phase = phase
        self._read_notes = read_notes
        self._calls = EpochCalls()
        self._begun = 0
        self._point = self._ended_point = 0
        self._repeated = 0

    @property
    def peers_are_ahead(self) -> bool:
        return self._phase() is ScriptPhase.JOINING

    def begin_epoch(self) -> None:
        if _STATE not in self._registry:
            self._registry.register(_STATE, self._calls.encode, self._calls.load)
        self._calls.drop(2 * self._begun)  # only the epoch that is continued begins again
        self._begun += 1
        self._open(2 * self._begun)

    def end_epoch(self) -> None:
        self._ended_point = 2 * self._begun + 1
        self._open(self._ended_point)

    def notes(self) -> bytes:
        """Returns what the script has called since its newest epoch ended: a state from the epoch's
        end does not contain it."""
        calls = self._calls.encode_points((self._ended_point, 2 * self._begun))
        return NOTES_PREFIX + calls if 0 < len(calls) <= _MAX_NOTES_BYTES else b""

    def begin_step(self) -> None:
        """Called where a training step begins: the calls that follow are not kept."""
        self.is_open = self.is_known = False

    def _open(self, point: int) -> None:
        self.is_open = self.is_known = False
        self._point, self._repeated = point, 0
        phase = self._phase()
        # A rank that trains calls with its peers, whatever it knows: they may not know it.
        is_known = phase is not ScriptPhase.TRAINING and self._knows(point)
        if phase is ScriptPhase.RESUMING:
            # Ranks may know different points: one that was new at this point had no peers there.
            self.is_agreeing = True
            is_known = all(all_gather_objects(is_known))
            self.is_agreeing = False
        if not is_known and phase is not ScriptPhase.JOINING:
            self._calls.begin(point)
        self.is_open, self.is_known = True, is_known

    def _knows(self, point: int) -> bool:
        notes = self._read_notes()
        if notes.startswith(NOTES_PREFIX):
            self._calls.load_bytes(notes.removeprefix(NOTES_PREFIX))
        return point in self._calls

    @property
    def records(self) -> bool:
        """Whether the results of the present call are kept."""
        return self.is_open and not self.is_known and self._phase() is not ScriptPhase.JOINING

    def record(self, name: str, outputs: Sequence[Tensor]) -> None:
        self._calls.add(self._point, name, outputs)

    def replays(self, name: str, outputs: Sequence[Tensor]) -> bool:
        """Fills in what the call has returned the first time. Returns False if that was not kept,
        or another call was made then."""
        if not self.is_known:
            self.forget()
            return False
        call = self._calls.get(self._point, self._repeated)
        self._repeated += 1
        if call is None:
            return False
        if call.name != name:
            self.forget()
            self.is_known = False
            return False
        shapes = [tensor.shape for tensor in call.tensors]
        if shapes != [output.shape for output in outputs]:
            return False
        for output, tensor in zip(outputs, call.tensors, strict=True):
            output.copy_(tensor)
        return bool(outputs)

    def forget(self) -> None:
        """Forgets the calls at this point: one of them had no peers, or is not that of the first
        time. A new member keeps those of its peers."""
        if self.is_open and self._phase() is not ScriptPhase.JOINING:
            self._calls.drop(self._point)
