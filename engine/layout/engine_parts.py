"""The parts of several engines in one training state.

The first engine's tensors have the same names as in a state with one engine. The names of another
engine's tensors begin with that engine's name: `critic:weights/...`. The JSON parts of the other
engines are in the first engine's JSON part, under the key `engines`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rayzero.engine.errors import DataError
from rayzero.engine.layout.state_index import BlockIndex, StateSource

if TYPE_CHECKING:
    from torch import Tensor

ENGINES = "engines"
"""Key of the JSON parts of all engines except the first, by name. Absent if there is one engine."""
NAME = "engine"
"""Key of the first engine's name. Absent if it was given none."""
MARK = ":"  # behind an engine's name in a tensor's name


def engines_of(source: StateSource) -> list[str]:
    """Returns the names of the engines in a state. The first engine's name is empty."""
    return ["", *source.metadata(0).get(ENGINES, ())]


def list_engines(source: StateSource) -> str:
    """Lists the names of the engines for an error message."""
    first = source.metadata(0).get(NAME, "the first one, without a name")
    return ", ".join([first, *engines_of(source)[1:]])


def find_part(source: StateSource, name: str | None, *, is_first: bool) -> str | None:
    """Returns the name under which a state has an engine's part (empty for the first engine); None
    if the state has no such part.

    Args:
        name: the name that the engine was given; None for a first engine without a name.
        is_first: whether the engine is the first one that trains.
    """
    document = source.metadata(0)
    if name in document.get(ENGINES, ()):
        return name
    known = document.get(NAME)
    is_bare = name is None or name == known or (is_first and known is None)
    return "" if is_bare else None


def open_part(source: StateSource, found: str) -> StateSource:
    """Returns the part of a state whose name `find_part` returned."""
    return _Part(source, found) if source.metadata(0).get(ENGINES) else source


def choose_part(source: StateSource, name: str | None) -> StateSource:
    """Returns an engine's part of a state that may come from another training function.

    A state of a single engine is returned whole, whatever `name` is. A `name` of None selects the
    first engine. Raises DataError if the state has no engine of this name.
    """
    names = engines_of(source)
    found = "" if len(names) == 1 else find_part(source, name, is_first=name is None)
    if found is None:
        raise DataError(
            f"the state of step {source.step} has no engine {name!r}",
            allowed=list_engines(source),
            fix="use the name that the engine had: initialize(name=...), or --engine",
        )
    return open_part(source, found)


def is_weight(full: str) -> bool:
    """Returns whether a tensor of the training state is a weight or buffer of an engine's model."""
    engine, mark, name = full.partition(MARK)
    own_name = name if mark and "/" not in engine else full
    return own_name.startswith(("weights/", "buffers/"))


class _Part(StateSource):
    """One engine's part of a state. The owner of the source closes it; this part does not."""

    def __init__(self, source: StateSource, name: str) -> None:
        self._source = source
        self._name = name
        self.step = int(self.metadata(0)["step"])
        self.block_indexes = [_index_of(index, name) for index in source.block_indexes]

    def metadata(self, rank: int) -> dict[str, Any]:
        document = self._source.metadata(rank)
        if not self._name:
            return document
        return {**document[ENGINES][self._name], "rng": document["rng"]}

    def read(self, block: int, offset: int, into: memoryview) -> None:
        self._source.read(block, offset, into)

    def registered_block(self, block: int) -> memoryview | None:
        return self._source.registered_block(block)

    def verify(self, block: int) -> None:
        self._source.verify(block)

    def tensor(self, block: int, offset: int, nbytes: int) -> Tensor | None:
        return self._source.tensor(block, offset, nbytes)


def _index_of(index: BlockIndex, engine: str) -> BlockIndex:
    """Returns the index of one engine's tensors in a block, under their names in that engine."""
    names = {full: name for full in index.tensors if (name := _own_name(full, engine)) is not None}
    return replace(
        index,
        tensors={name: index.tensors[full] for full, name in names.items()},
        ranges=tuple(
            replace(part, name=names[part.name]) for part in index.ranges if part.name in names
        ),
    )


def _own_name(full: str, engine: str) -> str | None:
    """Returns a tensor's name in the state of `engine`; None if it is another engine's tensor. A
    module's name may contain the mark too, but only behind a slash."""
    before, mark, name = full.partition(MARK)
    has_engine = bool(mark) and "/" not in before
    if engine:
        return name if has_engine and before == engine else None
    return None if has_engine else full
