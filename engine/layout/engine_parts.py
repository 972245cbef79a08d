"""The parts of several engines in one training state.

The first engine's tensors have their own names, as those of a function with one engine. Another's
begin with its name: `critic:weights/...`. Its JSON part is in that of the first, in `engines`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rayzero.engine.errors import DataError
from rayzero.engine.layout.state_index import BlockIndex, StateSource

if TYPE_CHECKING:
    from torch import Tensor

ENGINES = "engines"
"""The key of the JSON parts of all engines but the first, by name; missing if there are none."""
NAME = "engine"
"""The key of the first engine's name, if it was given one."""
MARK = ":"


def engines_of(source: StateSource) -> list[str]:
    """The names of the engines whose state a source has; the first one's is empty."""
    return ["", *source.metadata(0).get(ENGINES, ())]


def list_engines(source: StateSource) -> str:
    """The names of the engines, for an error."""
    first = source.metadata(0).get(NAME, "the first one, without a name")
    return ", ".join([first, *engines_of(source)[1:]])


def find_part(source: StateSource, name: str | None, *, is_first: bool) -> str | None:
    """The name in a state of an engine's part; None if there is none.

    Args:
        name: the engine's own; None for the first one, if it was given none.
        is_first: whether it is the first one that trains.
    """
    document = source.metadata(0)
    if name in document.get(ENGINES, ()):
        return name
    known = document.get(NAME)
    is_bare = name is None or name == known or (is_first and known is None)
    return "" if is_bare else None


def open_part(source: StateSource, found: str) -> StateSource:
    """The part of a state that `find_part` has found."""
    return _Part(source, found) if source.metadata(0).get(ENGINES) else source


def choose_part(source: StateSource, name: str | None) -> StateSource:
    """The part of the engine of this name, where the state is not the function's own: all of one
    that an engine has saved alone; None: that of the first engine. Raises DataError if there is
    none."""
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
    """Whether a tensor of the training state is a weight or a buffer of an engine's model."""
    before, mark, name = full.partition(MARK)
    own = name if mark and "/" not in before else full
    return own.startswith(("weights/", "buffers/"))


class _Part(StateSource):
    """One engine's part. The source stays its owner's."""

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
    """The index of one engine's tensors in a block, under their own names."""
    names = {full: name for full in index.tensors if (name := _own_name(full, engine)) is not None}
    return replace(
        index,
        tensors={name: index.tensors[full] for full, name in names.items()},
        ranges=tuple(replace(it, name=names[it.name]) for it in index.ranges if it.name in names),
    )


def _own_name(full: str, engine: str) -> str | None:
    """A tensor's name in its engine's state; None if it is another's. What a module is called may
    contain the mark, too."""
    before, mark, name = full.partition(MARK)
    is_others = bool(mark) and "/" not in before
    if engine:
        return name if is_others and before == engine else None
    return None if is_others else full
