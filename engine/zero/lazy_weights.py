"""Updated weights of stages 1 and 2, gathered while forward runs: `overlap_weight_gather`.

`step()` launches the all-gathers in the order of registration, which is about forward's and the
same on every rank, and waits for none. Each is waited for before the forward of a module that holds
one of its parameters. Parameters of modules that the last forward did not call (a ParameterList,
the projection in `nn.MultiheadAttention`) are waited for when the model's forward begins, because
another module reads them; so is everything when a part of the model is called on its own.

No weight can be read safely from outside before `wait`: a read of a tensor cannot be seen. So this
is a choice. Every method of the engine that reads or writes weights waits first, and so does the
vote: no update begins while a gather is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from rayzero.engine.comm.backend import Work
from rayzero.engine.compiling import untraced
from rayzero.engine.zero.unit import Unit


class LazyWeights:
    """The gathers of updated weights in flight, and the hooks that wait for them."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._pending: dict[str, Work] = {}  # by the unit's name, in launch order
        names = {param: unit.name for unit in units for param in unit.params}
        self._used: dict[nn.Module, set[str]] = {}  # the units of a module's own parameters
        for module in model.modules():
            used = {names[it] for it in module.parameters(recurse=False) if it in names}
            if used:
                self._used[module] = used
        self._called: set[nn.Module] = set()  # in the current or last forward of the model
        self._in_forward = False
        self.hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before_module)
            for module in self._used
            if module is not model
        ]
        self.hooks.append(model.register_forward_pre_hook(self._before_model, prepend=True))
        self.hooks.append(model.register_forward_hook(self._after_model, always_call=True))

    def start(self, pending: dict[str, Work]) -> None:
        """Takes gathers that have been launched, by unit; all earlier ones have been waited for."""
        self._pending = pending

    def wait(self) -> None:
        """Returns when all weights may be read (on CUDA: by work enqueued on the current stream)
        and written."""
        self._wait_for(set(self._pending))

    def _wait_for(self, names: Set[str]) -> None:
        """Waits in launch order, the same on every rank: on CPUs a wait also does this rank's share
        of a gather, so ranks that waited in different orders could wait for each other."""
        for name in [name for name in self._pending if name in names]:
            work = self._pending.pop(name)
            work.wait()

    @untraced
    def _before_model(self, model: nn.Module, args: Any) -> None:
        called, self._called = self._called, {model}
        self._in_forward = True
        for module, names in self._used.items() if self._pending else ():
            if module is model or module not in called:
                self._wait_for(names)

    @untraced
    def _before_module(self, module: nn.Module, args: Any) -> None:
        self._called.add(module)
        if self._pending:
            self._wait_for(self._used[module] if self._in_forward else set(self._pending))

    @untraced
    def _after_model(self, model: nn.Module, args: Any, output: Any) -> None:
        self._in_forward = False
        self.wait()
