"""Keeps the results of the collectives that a launched script calls between its epochs.

A script in a new process begins again. Its loop yields nothing in finished epochs, but the script
runs what follows each of them, such as an evaluation, with the weights of a later step. With the
results of the first time, its metrics, its choice of the best weights and its early stopping are
those of the other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class EpochCall:
    """A collective and its results.

    Attributes:
        tensors: in host memory; empty if the results were not kept.
    """

    name: str
    tensors: list[Tensor]


class ScriptPhase(Enum):
    """Where a script's process is, compared with the other ranks."""

    BEGINNING = "all ranks have begun the script, and none has finished a step"
    JOINING = "its peers are in their loops, where it will come"
    TRAINING = "it is in its loop, with its peers"


class EpochCalls:
    """The calls after each epoch, by its number. Used by the training thread."""

    def __init__(self) -> None:
        self._calls: dict[int, list[EpochCall]] = {}
        self._bytes = 0
        self._is_full = False
        self._encoded: Tensor | None = None

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._calls

    def begin(self, epoch: int) -> None:
        """The calls that follow are those after this epoch."""
        if not self._is_full:
            self._calls[epoch] = []

    def get(self, epoch: int, index: int) -> EpochCall | None:
        calls = self._calls.get(epoch, [])
        return calls[index] if index < len(calls) else None

    def add(self, epoch: int, name: str, outputs: Sequence[Tensor]) -> None:
        """Adds a call, if its epoch has begun. Results on a GPU are waited for."""
        if epoch not in self._calls:
            return
        self._bytes += sum(output.nbytes for output in outputs)
        if self._bytes > MAX_BYTES:
            self._is_full = True
            self.drop(epoch)
            log.warning(
                "the collectives that the script calls between its epochs have returned more than "
                "%d MiB: a worker that is replaced calls those after epoch %d and later ones alone",
                MAX_BYTES >> 20,
                epoch,
            )
            return
        tensors = [get_device(it.device).to_host(it.detach()).clone() for it in outputs]
        self._calls[epoch].append(EpochCall(name, tensors))
        self._encoded = None

    def drop(self, epoch: int) -> None:
        """Forgets the calls after an epoch, some of which had no peers."""
        self._calls.pop(epoch, None)
        self._encoded = None

    def encode(self) -> Tensor:
        """Returns the calls as bytes, for `load`."""
        if self._encoded is None:
            tensors = {
                f"{epoch}/{index}/{call.name}/{number}": tensor
                for epoch, calls in self._calls.items()
                for index, call in enumerate(calls)
                for number, tensor in enumerate(call.tensors or [torch.empty(0)])
            }
            self._encoded = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
        return self._encoded

    def load(self, encoded: Tensor) -> None:
        """Takes the calls that another process has encoded."""
        results: dict[tuple[int, int, str], dict[int, Tensor]] = {}
        for key, tensor in load(encoded.numpy().tobytes()).items():
            epoch, index, name, number = key.split("/")
            results.setdefault((int(epoch), int(index), name), {})[int(number)] = tensor
        for (called_after, _, name), outputs in sorted(results.items()):
            ordered = [outputs[number] for number in sorted(outputs)]
            tensors = [] if ordered[0].shape == (0,) else ordered
            self._calls.setdefault(called_after, []).append(EpochCall(name, tensors))
            self._bytes += sum(tensor.nbytes for tensor in tensors)


class EpochReplay(ScriptEpochs):
    """Keeps what is called after each epoch of a script, and repeats it in a new process. Used by
    the training thread.

    Attributes:
        is_after_epoch: whether the script is between two epochs.
        is_known: whether the calls that follow were made before.
        is_agreeing: whether the ranks are agreeing on that.
    """

    def __init__(self, registry: StateRegistry, phase: Callable[[], ScriptPhase]) -> None:
        self.is_after_epoch = self.is_known = self.is_agreeing = False
        self._registry = registry
        self._phase = phase
        self._calls = EpochCalls()
        self._begun = 0
        self._repeated = 0

    def begin_epoch(self) -> None:
        if _STATE not in self._registry:
            self._registry.register(_STATE, self._calls.encode, self._calls.load)
        self._begun += 1
        self.is_after_epoch = self.is_known = False

    def end_epoch(self, *, is_left_out: bool) -> None:
        self._repeated = 0
        is_known = self._begun in self._calls
        if is_left_out and self._phase() is ScriptPhase.BEGINNING:
            # A rank that was new when its peers evaluated lacks what they know.
            self.is_agreeing = True
            is_known = all(all_gather_objects(is_known))
            self.is_agreeing = False
        if not is_known and self._phase() is not ScriptPhase.JOINING:
            self._calls.begin(self._begun)
        self.is_after_epoch, self.is_known = True, is_known

    @property
    def records(self) -> bool:
        """Whether the results of the present call are kept."""
        return (
            self.is_after_epoch and not self.is_known and self._phase() is not ScriptPhase.JOINING
        )

    def record(self, name: str, outputs: Sequence[Tensor]) -> None:
        self._calls.add(self._begun, name, outputs)

    def replays(self, name: str, outputs: Sequence[Tensor]) -> bool:
        """Fills in what the call has returned the first time. Returns False if that was not kept,
        or another call was made then."""
        if not self.is_known:
            self.forget()
            return False
        call = self._calls.get(self._begun, self._repeated)
        self._repeated += 1
        if call is None:
            return False
        if call.name != name:
            self.forget()
            self.is_known = False
            return False
        if [it.shape for it in call.tensors] != [it.shape for it in outputs]:
            return False
        for output, tensor in zip(outputs, call.tensors, strict=True):
            output.copy_(tensor)
        return bool(outputs)

    def forget(self) -> None:
        """Forgets what a member of the group has called after this epoch: a call had no peers, or
        is not that of the first time."""
        if self.is_after_epoch and self._phase() is not ScriptPhase.JOINING:
            self._calls.drop(self._begun)
