"""The training state of a function's engines, together: one block, one JSON part, one step.

The first engine's tensors have their own names, as those of a function with one engine. Another's
begin with its name: `critic:weights/...`. Its JSON part is in that of the first, in `engines`. So
vaults, recovery and checkpoints know one state; an engine loads its part of it by `open_part`.

A step of the job is finished when every engine has stepped since the last one. Within it the state
is of no step: some engines have gone on, and the others have not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import is_not

from rayzero.engine.device import Device
from rayzero.engine.layout.engine_parts import ENGINES, MARK, NAME
from rayzero.engine.state import metadata
from rayzero.engine.state.ranges import StateBlock, StateRange, pack_block
from rayzero.engine.state.training import RunningCopy, TrainingState


class CompositeState:
    """The states of the engines that train, in the order of their construction, as one. For the
    training thread only, until that has ended.

    Attributes:
        first_name: the name that was given to the first engine, if any.
    """

    def __init__(self) -> None:
        self.first_name: str | None = None
        self._members: dict[str, TrainingState] = {}
        self._finished = 0  # steps of the job
        self._steps: dict[str, int] = {}  # each engine's at the end of the last one
        self._is_recutting = False
        self._parts: list[StateBlock] = []
        self._block = pack_block([])

    def add(self, name: str, state: TrainingState) -> None:
        """The first engine's `name` is empty."""
        self._members[name] = state
        self._steps[name] = state.progress.step

    def finish(self, step: int) -> None:
        """The state as of now is that of so many finished steps of the job."""
        self._finished = step
        self._steps = {name: it.progress.step for name, it in self._members.items()}

    def rebase(self, name: str) -> int:
        """An engine has loaded other progress, which is no step. Returns where it was at the end of
        the job's last step."""
        before, self._steps[name] = self._steps[name], self._members[name].progress.step
        return before

    def finished_of(self, name: str) -> int:
        """The steps that an engine had finished at the end of the job's last step."""
        return self._steps[name]

    @property
    def step(self) -> int | None:
        """Finished steps of the job in memory; None within one."""
        if len(self._members) == 1:
            return self._first.progress.step
        ahead = {it.progress.step > self._steps[name] for name, it in self._members.items()}
        return None if len(ahead) != 1 else self._finished + ahead.pop()

    @property
    def consistent(self) -> bool:
        """Whether all of the state belongs to one step of the job."""
        is_whole = self.step is not None and not self._is_recutting
        return is_whole and all(it.consistent for it in self._members.values())

    @property
    def altered(self) -> bool:
        return any(it.altered for it in self._members.values())

    @property
    def complete_on_rank(self) -> bool:
        return all(it.complete_on_rank for it in self._members.values())

    @property
    def update_is_collective(self) -> bool:
        return any(it.update_is_collective for it in self._members.values())

    @property
    def constants_version(self) -> int:
        return sum(it.constants_version for it in self._members.values())

    @property
    def device(self) -> Device:
        """The device of the first engine: all engines of a process share one."""
        return self._first.device

    @property
    def copied_by(self) -> RunningCopy | None:
        """See `TrainingState.copied_by`: of all engines."""
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
        """Around the re-cut of all engines to the state of that step: the state is of no step until
        the last one has succeeded. Deliberately no `finally`."""
        self._is_recutting = True
        yield
        self._is_recutting = False
        self.finish(step)

    def pack(self, *, whole: bool = False) -> StateBlock:
        """See `TrainingState.pack`."""
        parts = [state.pack(whole=whole) for state in self._members.values()]
        if len(parts) == 1:
            return parts[0]
        if whole or len(parts) != len(self._parts) or any(map(is_not, parts, self._parts)):
            named = zip(self._members, parts, strict=True)
            block = pack_block([_named(it, name) for name, part in named for it in part.ranges])
            if whole:
                return block
            self._parts, self._block = parts, block
        return self._block

    def metadata(self) -> bytes:
        return self.capture_metadata()()

    def capture_metadata(self) -> Callable[[], bytes]:
        """See `TrainingState.capture_metadata`."""
        documents = {name: it.capture_document() for name, it in self._members.items()}
        document = documents.pop("")
        for other in documents.values():
            del other["rng"]  # the process's, and so the same
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
        ranges=tuple(replace(it, name=start + it.name) for it in part.ranges),
        shapes={start + name: shape for name, shape in part.shapes.items()},
    )
