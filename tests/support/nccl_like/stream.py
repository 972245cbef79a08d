"""A virtual device: CPU tensors, whose kernels run later, in threads, in order of their stream.

While a collective stands, kernels that follow it are queued and the host runs ahead, as on a GPU.
The host waits only where it reads, for the stream of its thread: `synchronize`, `read`, `.item()`,
copies to host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rayzero.engine.device import Device, DeviceError
from tests.support.nccl_like.queues import Context, Stream
from tests.support.nccl_like.settings import NcclLike

POOL = 4
"""Streams beside the default one; torch has 32."""
_TAGS_READ = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class StreamMode(TorchDispatchMode):
    """Queues the operators of the thread that pushed it, while its stream is busy."""

    def __init__(
        self, current_stream: Callable[[], Stream], is_pinned: Callable[[Tensor], bool]
    ) -> None:
        super().__init__()
        self._current_stream = current_stream
        self._is_pinned = is_pinned

    @property
    def _stream(self) -> Stream:
        return self._current_stream()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._stream.check()
        if not self._stream.busy:
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        if not tensors or func.is_view:
            return func(*args, **kwargs)  # reads no data
        if any(self._is_host(tensor) for tensor in tensors):
            return self._read(func, args, kwargs)
        if func._schema.is_mutable:
            return self._queue_in_place(func, args, kwargs)
        return self._queue_functional(func, args, kwargs)

    def _is_host(self, tensor: Tensor) -> bool:
        """Memory that torch did not allocate is the host's: files, shared memory, numpy."""
        outside = not tensor.untyped_storage().resizable()
        return outside and tensor.device.type == "cpu" and not self._is_pinned(tensor)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._stream.synchronize()
        return func(*args, **kwargs)

    def _queue_in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        schema, given = func._schema, dict(kwargs)
        for argument, value in zip(schema.arguments, args, strict=False):
            given[argument.name] = value
        targets = [
            given.get(argument.name)
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        returns_targets = all(
            out.alias_info is not None and out.alias_info.is_write for out in schema.returns
        )
        name = func._schema.name
        unknown = any(isinstance(out, Tensor) and not out.numel() for out in targets)
        if unknown or not returns_targets or "set_" in name or "resize" in name:
            return self._read(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._read(func, args, kwargs)
        memory_args, memory_kwargs = _memory((args, kwargs))
        self._stream.launch(lambda: func(*memory_args, **memory_kwargs))
        if not schema.returns:
            return None
        outs = targets[: len(schema.returns)]
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _queue_functional(self, func: Any, args: Any, kwargs: Any) -> Any:
        tags = func.tags
        if any(tag in tags for tag in _TAGS_READ) or torch.Tag.nondeterministic_seeded in tags:
            return self._read(func, args, kwargs)
        meta_args, meta_kwargs = tree_map_only(Tensor, _to_meta, (args, kwargs))
        if meta_kwargs.get("device") is not None:
            meta_kwargs["device"] = torch.device("meta")
        try:
            shapes = func(*meta_args, **meta_kwargs)
        except Exception:  # noqa: BLE001  its shape depends on data, or is not known
            return self._read(func, args, kwargs)
        if not _only_tensors(shapes):
            return self._read(func, args, kwargs)
        results = tree_map_only(Tensor, _to_memory, shapes)
        targets = _memory(_tensors(results))
        memory_args, memory_kwargs = _memory((args, kwargs))

        def run() -> None:
            values = _tensors(func(*memory_args, **memory_kwargs))
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)

        self._stream.launch(run)
        return results


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, tree)
    return found


def _memory(tree: Any) -> Any:
    """The memory that tensors have now, as a launched kernel's: a parameter may get another."""
    return tree_map_only(Tensor, lambda tensor: tensor.data, tree)


def _only_tensors(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(item, Tensor) for item in value)
    return isinstance(value, Tensor)


def _to_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _to_memory(shape: Tensor) -> Tensor:
    return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)


class VirtualDevice(Device):
    """The product's device over some `Stream`s; what torch itself reads is patched by `install`.

    `settings` may be replaced at any time.
    """

    asynchronous = True
    backend = "nccl_like"

    def __init__(self, settings: NcclLike) -> None:
        super().__init__(torch.device("cpu"))
        self.settings = settings
        self._context = Context()
        self.stream = self.add_stream()
        """The default one."""
        self._health_stream = self.add_stream()
        self._pool = cycle([self.add_stream() for _ in range(POOL)])
        self._thread = threading.local()
        self._registered: list[range] = []

    def add_stream(self) -> Stream:
        return Stream(self._context)

    def mode(self) -> StreamMode:
        return StreamMode(self.current_stream, self._is_pinned)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return any(tensor.data_ptr() in memory for memory in self._registered)

    def register_host(self, memory: Tensor) -> None:
        self._registered.append(range(memory.data_ptr(), memory.data_ptr() + memory.nbytes))

    def unregister_host(self, memory: Tensor) -> None:
        self.synchronize()
        self._registered = [one for one in self._registered if one.start != memory.data_ptr()]

    def new_stream(self) -> Any:
        """One of a few, in turn, as torch's."""
        return next(self._pool)

    def current_stream(self) -> Any:
        return getattr(self._thread, "stream", self.stream)

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        before, self._thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._thread.stream = before

    def record_event(self) -> Any:
        return self.current_stream().record()

    def synchronize(self, timeout_s: float | None = None) -> None:
        try:
            self._context.synchronize(timeout_s)
        except TimeoutError as error:
            raise DeviceError(f"the virtual device did not answer: {error}") from None

    def to_host(self, tensor: Tensor) -> Tensor:
        self.current_stream().synchronize()
        return tensor.detach().clone()

    def send(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def check_health(self, timeout_s: float) -> None:
        """As the product's on a GPU, a kernel on a stream of its own."""
        try:
            self._health_stream.launch(lambda: None)
            self._health_stream.synchronize(timeout_s)
        except (TimeoutError, RuntimeError) as error:
            raise DeviceError(f"the virtual device failed: {error}") from error
