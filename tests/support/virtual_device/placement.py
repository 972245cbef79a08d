"""Tensors of "cuda:0" whose memory is the CPU's: translates what Python says about devices.

Below Python all tensors are the CPU's. This mode takes `device` and `pin_memory` out of calls,
remembers where the results are, and answers what a tensor's device is. So code sees what it would
see on a GPU, and copies between host and device are copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.virtual_device.machine import Machine, find_machine
from tests.support.virtual_device.memory import Home

DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_FACTORIES = {
    *(torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor, torch.as_tensor),
    *(torch.arange, torch.linspace, torch.eye, torch.rand, torch.randn, torch.randint),
    *(torch.randperm, torch.empty_strided, torch.from_numpy),
}
_NEW = {
    *(Tensor.new_tensor, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty),
}
_FROM_PYTHON = {torch.tensor, torch.as_tensor, Tensor.new_tensor}


class Placement(TorchFunctionMode):
    """One rank's tensors. Python of other threads than the rank's is not translated."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._handlers: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: lambda tensor: self._device(tensor),
            Tensor.is_cuda.__get__: lambda tensor: self._device(tensor).type == "cuda",
            Tensor.is_cpu.__get__: lambda tensor: self._device(tensor).type == "cpu",
            Tensor.get_device: lambda tensor: -1 if self._on_host(tensor) else 0,
            Tensor.is_pinned: self._is_pinned,
            Tensor.to: self._to,
            Tensor.cpu: lambda tensor: self._move(tensor, _CPU),
            Tensor.cuda: lambda tensor, *_, **options: self._move(tensor, DEVICE, **options),
            Tensor.pin_memory: self._pin,
            Tensor.tolist: self._tolist,
            Tensor.numpy: self._numpy,
            Tensor.__array__: self._numpy,
            Tensor.backward: self._backward,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if "device" in kwargs or "pin_memory" in kwargs or func in _FACTORIES or func in _NEW:
            return self._make(func, args, dict(kwargs))
        return func(*args, **kwargs)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A new tensor. A Python value for the device is copied there, and the host waits."""
        device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if device is not None and torch.device(device).type == "meta":
            return func(*args, **kwargs)
        machine = self._machine
        if device is not None:
            home = Home.DEVICE if torch.device(device).type == "cuda" else Home.PAGEABLE
            kwargs["device"] = _CPU
        elif func in _FACTORIES:
            home = Home.PAGEABLE
        elif args and isinstance(args[0], Tensor) and not args[0].is_meta:
            home = machine.home_of(args[0])
        else:
            return func(*args, **kwargs)
        home = Home.PINNED if pinned else home
        with machine.results_in(home):
            made = func(*args, **kwargs)
        if isinstance(made, Tensor) and not made.is_meta:
            machine.place(made, home)
        if func in _FROM_PYTHON and home is Home.DEVICE:
            machine.host_waits("blocking copy of Python numbers", machine.stream.clock)
        return made

    def _on_host(self, tensor: Tensor) -> bool:
        return self._machine.home_of(tensor).on_host

    def _device(self, tensor: Tensor) -> torch.device:
        if tensor.is_meta:
            return torch.device("meta")
        return _CPU if self._on_host(tensor) else DEVICE

    def _is_pinned(self, tensor: Tensor, *_: Any) -> bool:
        return self._machine.home_of(tensor) in (Home.PINNED, Home.REGISTERED)

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`Tensor.to` in all its forms."""
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        rest = list(args)
        if rest and isinstance(rest[0], Tensor):
            device, dtype = self._device(rest[0]), rest.pop(0).dtype
        if rest and isinstance(rest[0], torch.device | str | int):
            device = rest.pop(0)
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            dtype = rest.pop(0) or dtype
        options = dict(zip(("non_blocking", "copy"), rest, strict=False)) | kwargs
        if device is None:
            return tensor.to(dtype or tensor.dtype, **options)
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return self._move(tensor, target, dtype=dtype, **options)

    def _move(
        self,
        tensor: Tensor,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
        **_: Any,
    ) -> Tensor:
        """The tensor on a device; itself if it is there."""
        dtype = dtype or tensor.dtype
        if device.type == "meta" or tensor.is_meta:
            return tensor.to(device, dtype, non_blocking, copy)
        on_host = self._on_host(tensor)
        if on_host == (device.type == "cpu"):
            return tensor.to(dtype, copy=copy)
        with self._machine.results_in(Home.DEVICE if on_host else Home.PAGEABLE):
            made: Tensor = torch.ops.aten._to_copy.default(
                tensor, dtype=dtype, non_blocking=non_blocking
            )
        return made

    def _pin(self, tensor: Tensor, *_: Any) -> Tensor:
        if self._is_pinned(tensor):
            return tensor
        with self._machine.results_in(Home.PINNED):
            return tensor.clone()

    def _tolist(self, tensor: Tensor) -> Any:
        machine = self._machine
        if not tensor.is_meta:
            on_host = self._on_host(tensor)
            machine.run("tolist", [tensor], [], machine.host if on_host else None)
            if not on_host:
                machine.host_waits("tolist", machine.stream.clock)
        return tensor.tolist()

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._on_host(tensor):
            raise TypeError("a tensor of cuda:0 has no numpy array: copy it to host memory first")
        self._machine.run("numpy", [tensor], [], self._machine.host)
        return tensor.numpy(*args, **kwargs)

    def _backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = (),
    ) -> None:
        """As torch's, but hooks run with this mode, too."""
        with self._machine.home(Home.DEVICE):
            seed = torch.ones_like(loss) if gradient is None else gradient
            keep = create_graph if retain_graph is None else retain_graph
            with self:
                torch.autograd.graph._engine_run_backward(
                    (loss,),
                    (seed,),
                    keep,
                    create_graph,
                    inputs or (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )


_frombuffer = torch.frombuffer


def frombuffer(buffer: Any, **options: Any) -> Tensor:
    """Replaces torch's, which modes do not see."""
    made = _frombuffer(buffer, **options)
    if (machine := find_machine()) is not None:
        machine.memory.alias(made)
        machine.place(made, Home.PAGEABLE)
    return made


def group_tensors(lists: list[list[Any]], with_indices: bool = False) -> dict[Any, Any]:
    """Replaces `torch._C._group_tensors_by_device_and_dtype`: by the devices that Python sees."""
    groups: dict[Any, tuple[list[list[Any]], list[int]]] = {}
    for index, first in enumerate(lists[0]):
        lists_of_group, indices = groups.setdefault(
            (first.device, first.dtype), ([[] for _ in lists], [])
        )
        for source, target in zip(lists, lists_of_group, strict=True):
            target.extend(source[index : index + 1])
        if with_indices:
            indices.append(index)
    return groups
