"""Deferred initialization: models are built on the meta device and materialized unit by unit.

`zero_init` records the operations of a model's constructor on the meta device, and replays them for
one parameter at a time when the engine builds that parameter's unit. The values equal those of an
ordinary construction with the same seed: each random operation's RNG state is saved, and the
operation also runs once on a scratch tensor to advance the generator.

Method: torchdistX's `deferred_init`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rayzero.engine.errors import ConfigError
from rayzero.engine.tensor_tree import iter_tensors


@dataclass(frozen=True)
class _RecordedOp:
    """One recorded call. A replay substitutes real tensors for meta tensors in its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    random_state: Tensor | None

    @property
    def generator(self) -> torch.Generator:
        return self.kwargs.get("generator") or torch.default_generator


class OpRecorder:
    """A constructor's operations, by the storage they touched.

    The recorded meta tensors keep all storages alive, so that no address is used twice.
    """

    def __init__(self) -> None:
        self._operations: list[_RecordedOp] = []
        self._ops_by_storage: dict[int, list[int]] = {}

    def add(self, operation: _RecordedOp, touched: list[Tensor]) -> None:
        for key in {_storage_key(tensor) for tensor in touched}:
            self._ops_by_storage.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)

    def has_recorded(self, tensor: Tensor) -> bool:
        return _storage_key(tensor) in self._ops_by_storage

    def replay(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The value of `tensor` after all recorded operations, as a new tensor."""
        real: dict[int, Tensor] = {}
        for number in self._dependencies(tensor):
            self._replay_op(self._operations[number], real)
        return _real_view(tensor, real).to(device)

    def _dependencies(self, tensor: Tensor) -> list[int]:
        """The operations that wrote the storage, and their inputs', in recorded order."""
        storages, needed = [_storage_key(tensor)], set[int]()
        seen = set(storages)
        while storages:
            for number in self._ops_by_storage.get(storages.pop(), ()):
                if number in needed:
                    continue
                needed.add(number)
                operation = self._operations[number]
                for other in iter_tensors((operation.args, operation.kwargs)):
                    key = _storage_key(other)
                    if _is_unmaterialized(other) and key not in seen:
                        seen.add(key)
                        storages.append(key)
        return sorted(needed)

    def _replay_op(self, operation: _RecordedOp, real: dict[int, Tensor]) -> None:
        args, kwargs = tree_map_only(
            Tensor,
            lambda tensor: _real_view(tensor, real) if _is_unmaterialized(tensor) else tensor,
            (operation.args, operation.kwargs),
        )
        generator = operation.generator
        before = generator.get_state()
        if operation.random_state is not None:
            generator.set_state(operation.random_state)
        results = operation.func(*args, **kwargs)
        generator.set_state(before)
        for planned, result in zip(operation.outputs, iter_tensors(results), strict=True):
            real.setdefault(_storage_key(planned), result)


class ScratchBuffer:
    """Reused memory for one tensor at a time: repeated large allocations fragment the heap."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def flat(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized flat tensor. It invalidates the previous one."""
        size = numel * dtype.itemsize
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8, device=self._memory.device)
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:size].view(dtype)


class _RecordingMode(TorchDispatchMode):
    """Runs a constructor's operations on the meta device, and records them."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._scratch = ScratchBuffer(torch.device("cpu"))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == torch.device("meta"):  # copied from a recorded tensor
            kwargs["device"] = torch.device("cpu")
        inputs = list(iter_tensors((args, kwargs)))
        if func is torch.ops.aten._local_scalar_dense.default and _is_unmaterialized(inputs[0]):
            return self._recorder.replay(inputs[0], torch.device("cpu")).item()
        if inputs and not any(_is_unmaterialized(one) for one in inputs):
            return func(*args, **kwargs)  # real tensors from outside are not recorded
        factory = not inputs and any(one.name == "device" for one in func._schema.arguments)
        if not inputs and not factory:
            return func(*args, **kwargs)
        state = self._advance_rng(func, args, kwargs)
        places = factory or "device" in kwargs
        on_meta = dict(kwargs, device=torch.device("meta")) if places else kwargs
        meta_args, meta_kwargs = tree_map_only(
            Tensor, lambda one: one if _is_unmaterialized(one) else one.to("meta"), (args, on_meta)
        )
        results = func(*meta_args, **meta_kwargs)
        outputs = tuple(iter_tensors(results))
        input_keys = {_storage_key(tensor) for tensor in inputs}
        created = [tensor for tensor in outputs if _storage_key(tensor) not in input_keys]
        if created or func._schema.is_mutable:
            self._recorder.add(_RecordedOp(func, args, kwargs, outputs, state), [*inputs, *created])
        return results

    def _advance_rng(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Advances a random operation's generator; its state before, None for other operations."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        generator = kwargs.get("generator") or torch.default_generator
        state: Tensor = generator.get_state()

        def real(tensor: Tensor) -> Tensor:
            # The same strides, because the count of random numbers depends on the layout.
            numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            flat = self._scratch.flat(numel, tensor.dtype)
            return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

        func(*tree_map_only(Tensor, real, args), **kwargs)
        return state


def _is_unmaterialized(tensor: Tensor) -> bool:
    """Whether a tensor has no memory yet."""
    return tensor.device.type == "meta"


def _storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _real_view(planned: Tensor, real: dict[int, Tensor]) -> Tensor:
    """The real counterpart of a meta tensor: the same view of the real storage."""
    return real[_storage_key(planned)].as_strided(
        planned.size(), planned.stride(), planned.storage_offset()
    )


_recorders: list[OpRecorder] = []  # of models that no engine has been built from
_active_recorders: list[OpRecorder] = []  # of the open contexts


@contextmanager
def zero_init() -> Iterator[None]:
    """Builds a model without allocating its memory; the engine materializes it unit by unit.

    Example:
        >>> with rayzero.zero_init():
        ...     model = GPT(config)
        >>> engine, *_ = rayzero.initialize(model=model, config=config)

    A function given as `initialize(model=function)` is called inside this context.
    """
    recorder = OpRecorder()
    _recorders.append(recorder)
    with _record_into(recorder):
        yield


@contextmanager
def recording(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Records operations on tensors of a model that `zero_init` built.

    Does nothing for tensors that have memory, and inside `zero_init`.
    """
    planned = [one for one in tensors if _is_unmaterialized(one)]
    recorders = [
        recorder for recorder in _recorders if any(recorder.has_recorded(one) for one in planned)
    ]
    if not recorders or _active_recorders:
        yield
        return
    with _record_into(recorders[0]):
        yield


@contextmanager
def _record_into(recorder: OpRecorder) -> Iterator[None]:
    _active_recorders.append(recorder)
    try:
        with _RecordingMode(recorder), _patched_is_meta():
            yield
    finally:
        _active_recorders.pop()


@contextmanager
def _patched_is_meta() -> Iterator[None]:
    """Hides `is_meta`, because some functions of `torch.nn.init` skip meta tensors.

    It applies to all threads while a model is built.
    """
    torch.Tensor.is_meta = property(lambda _: False)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.is_meta  # the base class's attribute is visible again


class Materializer:
    """Computes the initial values of a model's parameters and buffers, one at a time."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._owners = {
            id(tensor): module
            for module in model.modules()
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        }
        self._last_reset: tuple[nn.Module, nn.Module] | None = None

    def initial_value(self, tensor: Tensor) -> Tensor:
        """A real tensor with this parameter's or buffer's initial values.

        Raises:
            ConfigError: it is on the meta device, and its initial values are unknown.
        """
        if not tensor.is_meta or self._device.type == "meta":
            return tensor.detach()
        for recorder in _recorders:
            if recorder.has_recorded(tensor):
                return recorder.replay(tensor, self._device).detach()
        return self._value_from_reset(tensor)

    def clear(self) -> None:
        """Drops the recordings once the model is materialized."""
        self._last_reset = None
        _recorders.clear()

    def _value_from_reset(self, tensor: Tensor) -> Tensor:
        """Calls the owning module's `reset_parameters` on a real copy of it."""
        owner = self._owners[id(tensor)]
        reset: Callable[[nn.Module], None] | None = getattr(type(owner), "reset_parameters", None)
        if reset is None:
            raise ConfigError(
                f"the model is on the meta device, and {type(owner).__name__} has no "
                "reset_parameters() to give its weights values",
                fix="build the model inside rayzero.zero_init(), or pass a function as `model`",
            )
        if self._last_reset is None or self._last_reset[0] is not owner:
            real = copy.deepcopy(owner).to_empty(device=self._device)
            reset(real)
            self._last_reset = owner, real
        name = next(
            name
            for name, one in [*owner.named_parameters(), *owner.named_buffers()]
            if one is tensor
        )
        real = self._last_reset[1]
        is_param = isinstance(tensor, nn.Parameter)
        return real.get_parameter(name).detach() if is_param else real.get_buffer(name)
