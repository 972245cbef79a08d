"""The training state of all engines of a function: one block, one JSON part, one step.

`layout/engine_parts.py` describes the names of the tensors and the JSON part. Vaults, recovery and
checkpoints thus handle one state; an engine loads its part of the state with `open_part`.

A step of the job is finished when every engine has stepped since the job's previous step. In
between, when some engines have stepped and others have not, the state belongs to no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import is_

from rayzero.engine.device import Device
from rayzero.engine.layout.engine_parts import ENGINES, MARK, NAME
from rayzero.engine.state import metadata
from rayzero.engine.state.ranges import StateBlock, StateRange, pack_block
from rayzero.engine.state.training import RunningCopy, TrainingState


class CompositeState:
    """The states of the engines that train, in the order of their construction, as one state. Used
    only by the training thread until that thread has ended.

    Attributes:
        first_name: the name that was given to the first engine, if any.
    """

    def __init__(self) -> None:
        self.first_name: str | None = None
        self._members: dict[str, TrainingState] = {}
        self._finished = 0  # steps of the job
        self._steps: dict[str, int] = {}  # each engine's steps at the end of the job's last step
        self._is_recutting = False
        self._parts: list[StateBlock] = []
        self._block = pack_block([])

    def add(self, name: str, state: TrainingState) -> None:
        """Adds the state of an engine. The first engine's `name` is empty."""
        self._members[name] = state
        self._steps[name] = state.progress.step

    def finish(self, step: int) -> None:
        """Declares that the current state is that of `step` finished steps of the job."""
        self._finished = step
        self._steps = {name: state.progress.step for name, state in self._members.items()}

    def rebase(self, name: str) -> int:
        """Accepts that an engine has loaded other progress, which does not count as a step. Returns
        the engine's steps at the end of the job's last step."""
        before, self._steps[name] = self._steps[name], self._members[name].progress.step
        return before

    def finished_of(self, name: str) -> int:
        """Returns the engine's steps at the end of the job's last step."""
        return self._steps[name]

    @property
    def step(self) -> int | None:
        """Finished steps of the job in memory; None within a step of the job."""
        if len(self._members) == 1:
            return self._first.progress.step
        members = self._members.items()
        stepped = [name for name, state in members if state.progress.step > self._steps[name]]
        if not members or 0 < len(stepped) < len(members):
            return None
        return self._finished + 1 if stepped else self._finished

    @property
    def consistent(self) -> bool:
        """Whether all of the state belongs to one step of the job."""
        is_whole = self.step is not None and not self._is_recutting
        return is_whole and all(state.consistent for state in self._members.values())

    @property
    def altered(self) -> bool:
        return any(state.altered for state in self._members.values())

    @property
    def complete_on_rank(self) -> bool:
        return all(state.complete_on_rank for state in self._members.values())

    @property
    def update_is_collective(self) -> bool:
        return any(state.update_is_collective for state in self._members.values())

    @property
    def constants_version(self) -> int:
        return sum(state.constants_version for state in self._members.values())

    @property
    def device(self) -> Device:
        """The device of the first engine: all engines of a process share one."""
        return self._first.device

    @property
    def copied_by(self) -> RunningCopy | None:
        """See `TrainingState.copied_by`. The copy is one of all engines' states."""
        return self._first.copied_by

    @copied_by.setter
    def copied_by(self, copy: RunningCopy | None) -> None:
        for state in self._members.values():
            state.copied_by = copy

    def confirm(self) -> None:
        """See `TrainingState.confirm`. By any thread."""
        for state in [*self._members.values()]:
            state.confirm()

    @contextmanager
    def recutting(self, step: int) -> Iterator[None]:
        """Surrounds the re-cut of all engines to the state of `step`. The state is inconsistent
        until the last engine's re-cut has succeeded. Deliberately without `finally`."""
        self._is_recutting = True
        yield
        self._is_recutting = False
        self.finish(step)

    def pack(self, *, whole: bool = False) -> StateBlock:
        """See `TrainingState.pack`."""
        parts = [state.pack(whole=whole) for state in self._members.values()]
        if len(parts) == 1:
            return parts[0]
        is_same = len(parts) == len(self._parts) and all(map(is_, parts, self._parts))
        if whole or not is_same:
            named = zip(self._members, parts, strict=True)
            ranges = [_named(held, name) for name, part in named for held in part.ranges]
            if whole:
                return pack_block(ranges)
            self._parts, self._block = parts, pack_block(ranges)
        return self._block

    def metadata(self) -> bytes:
        return self.capture_metadata()()

    def capture_metadata(self) -> Callable[[], bytes]:
        """Captures the JSON part as of now. Returns a function that encodes it, to be called before
        the next update, which changes scalars in it. Only that call waits for the device."""
        documents = {name: state.capture_document() for name, state in self._members.items()}
        document = documents.pop("")
        for other in documents.values():
            del other["rng"]  # all engines share the generators of the process
        if documents:
            document[ENGINES] = documents
        if self.first_name is not None:
            document[NAME] = self.first_name
        return partial(metadata.encode, document)

    @property
    def _first(self) -> TrainingState:
        return self._members[""]


def _named(part: StateRange, engine: str) -> StateRange:
    if not engine:
        return part
    start = engine + MARK
    return replace(
        part,
        ranges=tuple(replace(held, name=start + held.name) for held in part.ranges),
        shapes={start + name: shape for name, shape in part.shapes.items()},
    )
