"""Large modules outside the repeated blocks: an embedding, a head.

Each is a block of its own, so that it is not gathered all through forward and backward. That is
safe only if its own forward alone uses its weights: a tied weight, `F.linear(x, embed.weight)` or a
fused loss read them elsewhere. So in the first step they are gathered with the root, and reads are
observed. At the step's end the ranks agree: a module whose weights were read outside its forward on
any rank stays with the root, and the others become blocks. A first read elsewhere in a later step
(another path of evaluation) is an error, because the values would be NaN.

Reads are seen where `module.weight` is looked up, whatever is then done with the tensor. A weight
that a module of the model also keeps in an attribute (a list, a dict, a function's closure) could
be read from there, so it counts as read. Of references elsewhere nothing is known: there a weight
is NaN, and its gradient is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, ItemsView, Iterable, Sequence, ValuesView
from types import CellType, FunctionType
from typing import Any

from torch import nn

from rayzero.engine.errors import EngineError
from rayzero.engine.zero.gather_buffers import Block, BlockState

log = logging.getLogger("rayzero.engine")


class LargeModules:
    """Decides which large modules are gathered for their own forward only.

    Args:
        blocks: of the large modules.
        kept_elsewhere: those of them whose weights can be read without looking them up.
        agree: which of some flags are set on any rank; collective.

    Attributes:
        with_root: the blocks that are gathered when the model's forward begins, until the update.
        in_pass: the model's forward or the engine's backward is running.
        trained: a backward has ended.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        kept_elsewhere: Iterable[Block],
        agree: Callable[[Sequence[bool]], list[bool]],
    ) -> None:
        self.with_root = list(blocks)
        self.in_pass = False
        self.trained = False
        self._agree = agree
        self._undecided = bool(blocks)
        self._read_elsewhere = set(kept_elsewhere)
        self._reads = {
            block: ObservedReads(block.module, self._observer(block)) for block in blocks
        }

    def enter_forward(self, block: Block) -> None:
        """Reads are the module's own until `exit_forward`."""
        if block in self._reads:
            self._reads[block].stop()

    def exit_forward(self, block: Block) -> None:
        if block in self._reads:
            self._reads[block].start()

    def decide(self) -> bool:
        """After an update; True once, when the ranks have agreed. Collective until then."""
        if not self._undecided:
            return False
        untrained, *elsewhere = self._agree(
            [not self.trained, *(block in self._read_elsewhere for block in self.with_root)]
        )
        if untrained:
            return False
        self._undecided = False
        self.with_root = [it for it, read in zip(self.with_root, elsewhere, strict=True) if read]
        for block in self.with_root:
            self._reads.pop(block).stop()
            log.info(
                "stage 3: the weights of %r are read outside its forward: they stay gathered "
                "through forward and backward",
                block.name,
            )
        return True

    def remove(self) -> None:
        """Gives the modules their own dicts of parameters again."""
        for reads in self._reads.values():
            reads.stop()
        self._reads.clear()

    def _observer(self, block: Block) -> Callable[[], None]:
        def on_read() -> None:  # not a method: a copy of the module must not copy the engine
            if not self.in_pass:
                return
            if self._undecided:
                self._read_elsewhere.add(block)
            elif block.state is not BlockState.GATHERED:
                raise EngineError(
                    f"a weight of {block.name!r} was read outside its forward, where it is not "
                    "gathered; it was not in the first step",
                    fix="rayzero.unshard_min_numel: 0 in the engine config",
                )

        return on_read


def blocks_kept_elsewhere(model: nn.Module, blocks: Sequence[Block]) -> set[Block]:
    """The large blocks one of whose weights is also in an attribute of a module, or inside it."""
    owners = {
        id(param): block
        for block in blocks
        if block.large
        for unit in block.units
        for param in unit.params
    }
    found, seen = set[Block](), set[int]()
    pending: list[Any] = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if owners and name != "_parameters"
    ]
    while pending:
        value = pending.pop()
        if id(value) in owners:
            found.add(owners[id(value)])
        elif id(value) not in seen and (inside := _contents(value)):
            seen.add(id(value))
            pending += inside
    return found


def _contents(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, FunctionType):  # what its closure refers to; a cell may be empty
        return [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
    return value if isinstance(value, list | tuple) else ()


class ObservedReads(dict[str, Any]):
    """Stands for a module's `_parameters`, and calls `on_read` when a parameter is looked up."""

    def __init__(self, module: nn.Module, on_read: Callable[[], None]) -> None:
        super().__init__(dict(module._parameters))
        self._module = module
        self._plain = dict(module._parameters)
        self._on_read = on_read
        self.start()

    def start(self) -> None:
        self._module.__dict__["_parameters"] = self

    def stop(self) -> None:
        self._module.__dict__["_parameters"] = self._plain

    def __getitem__(self, name: str) -> Any:
        self._on_read()
        return super().__getitem__(name)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._on_read()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._on_read()
        return super().values()

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self._plain,)  # copies and pickles are of the parameters only
