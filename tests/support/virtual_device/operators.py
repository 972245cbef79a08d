"""Books every operator of torch as a kernel of the current virtual stream, or as work of the host.

An operator runs on the device if one of its tensors is there. One whose tensors are all in host
memory runs in the calling thread. Only copies may have both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.virtual_device.machine import Machine
from tests.support.virtual_device.memory import Home

_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_COPIES = {"copy_", "_to_copy"}
# The host must know something that is in device memory.
_HOST_READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}


@dataclass(frozen=True)
class _Operator:
    """What a schema says. `writes`: names of arguments that are written."""

    name: str
    arguments: tuple[str, ...]
    writes: frozenset[str]
    views: bool

    @property
    def inert(self) -> bool:
        """It only describes memory."""
        return self.views or self.name in ("detach", "lift_fresh", "_version", "set_")


@cache
def _operator(func: Any) -> _Operator:
    schema = func._schema
    written = frozenset(argument.name for argument in schema.arguments if argument.is_write)
    aliases = [result.alias_info for result in schema.returns]
    views = any(alias is not None and not alias.is_write for alias in aliases)
    name = schema.name.split("::")[-1]
    return _Operator(name, tuple(argument.name for argument in schema.arguments), written, views)


class Operators(TorchDispatchMode):
    """Runs operators, and books them with a machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            operator = _operator(func)
            out = func(*args, **kwargs)
            if not operator.inert:
                given = dict(zip(operator.arguments, args, strict=False)) | kwargs
                self._book(operator, given, out)
            return out

    def _book(self, operator: _Operator, given: dict[str, Any], out: Any) -> None:
        reads, writes = [], []
        for name, value in given.items():
            (writes if name in operator.writes else reads).extend(_tensors(value))
        fresh = [it for it in _tensors(out) if all(it is not written for written in writes)]
        if any(tensor.is_meta for tensor in (*reads, *writes, *fresh)):
            return
        machine, inputs = self._machine, reads + writes
        for tensor in fresh:  # a result that shares an input's storage keeps its home
            if machine.memory.home(tensor) is None:
                machine.place(tensor, self._home_of_results(operator, inputs))
        if operator.name in _UNWRITTEN:
            return
        homes = [machine.home_of(tensor) for tensor in (*inputs, *fresh)]
        on_host = [home.on_host for home in homes]
        if all(on_host):
            machine.run(operator.name, reads, writes + fresh, machine.host)
            return
        if not any(on_host):
            machine.run(operator.name, reads, writes + fresh)
        else:
            self._book_mixed(operator, reads, writes + fresh, given)
        if operator.name in _HOST_READS:
            machine.host_waits(operator.name, machine.stream.clock)

    def _book_mixed(
        self,
        operator: _Operator,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        given: dict[str, Any],
    ) -> None:
        """A copy between host and device, or numbers in host memory that a kernel gets by value."""
        machine = self._machine
        if operator.name not in _COPIES:
            by_value = [it for it in reads if machine.home_of(it).on_host]
            on_device = [it for it in reads if not machine.home_of(it).on_host]
            if any(it.ndim for it in by_value) or any(machine.home_of(it).on_host for it in writes):
                raise RuntimeError(f"{operator.name} got tensors in host and in device memory")
            machine.run(operator.name, by_value, [], machine.host)
            machine.run(operator.name, on_device, writes)
            return
        memory = next(
            machine.home_of(it) for it in (*reads, *writes) if machine.home_of(it).on_host
        )
        down = machine.home_of(writes[0]).on_host
        staged = memory is Home.PAGEABLE
        if staged and not down:  # read by the host, into a staging buffer
            machine.run(operator.name, reads, [], machine.host)
            reads = []
        machine.run(operator.name, reads, writes)
        if not given.get("non_blocking") or (staged and down):
            kind = f"blocking copy {'to the host' if down else 'to the device'}"
            machine.host_waits(kind, machine.stream.clock)

    def _home_of_results(self, operator: _Operator, inputs: Sequence[Tensor]) -> Home:
        machine = self._machine
        known = [(tensor.ndim > 0, machine.home_of(tensor)) for tensor in inputs]
        if machine.forced_home is not None or not known:
            return machine.forced_home or machine.default_home
        large = [home for has_dims, home in known if has_dims] or [home for _, home in known]
        # Results of pinned memory are not pinned.
        return Home.DEVICE if Home.DEVICE in large else Home.PAGEABLE


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, Tensor):
                yield item
