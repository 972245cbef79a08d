"""Records the operations of a constructor on meta tensors, and replays them on real ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rayzero.engine.errors import ConfigError
from rayzero.engine.tensor_tree import iter_tensors, storage_id
from rayzero.engine.torch_private import without_dispatch_modes
from rayzero.engine.zero.scratch import ScratchBuffer

_CPU, _META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True)
class _RecordedOp:
    """One recorded call. A replay substitutes real tensors for meta tensors in its arguments, which
    are its `inputs`. All tensors are aliases: the constructor may exchange the data of its own.

    Attributes:
        sources: the real arguments and their versions: a replay needs them as they were.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    outputs: list[Tensor]
    sources: list[tuple[Tensor, int]]
    random_state: Tensor | None


class ConstructorRecorder(TorchDispatchMode):
    """Runs a constructor's operations on the meta device, and records them by the storages they
    touched. An operation whose result depends on values, or that writes to a tensor which has
    memory, runs at once.

    The recorded meta tensors keep all storages alive, so that no address is used twice.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = count()
        self._operations: dict[int, _RecordedOp] = {}
        self._ops_by_storage: dict[int, list[int]] = {}
        self.scratch: ScratchBuffer | None = None  # while recording
        self.modules = WeakValueDictionary[int, nn.Module]()
        """By id: those that got a parameter, buffer or child while it recorded, and have no engine
        yet. A copy by `copy.deepcopy` alone is not among them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == _META:  # copied from a recorded tensor
            kwargs["device"] = _CPU
        inputs = list(iter_tensors((args, kwargs)))
        planned = list(filter(is_unmaterialized, inputs))
        creates = any(argument.name == "device" for argument in func._schema.arguments)
        if not (planned if inputs else creates):
            return func(*args, **kwargs)  # real tensors from outside are not recorded
        needs_values = torch.Tag.data_dependent_output in func.tags
        if needs_values or not all(map(is_unmaterialized, _written(func, args, kwargs))):
            return self._run(func, args, kwargs)
        on_meta = dict(kwargs, device=_META) if not inputs or "device" in kwargs else kwargs
        meta_args, meta_kwargs = tree_map_only(Tensor, lambda it: it.to(_META), (args, on_meta))
        try:
            results = func(*meta_args, **meta_kwargs)
        except NotImplementedError:  # not on the meta device: its shape depends on values
            return self._run(func, args, kwargs)
        state = self._advance_rng(func, args, kwargs)
        outputs = list(iter_tensors(results))
        input_keys, output_keys = _storage_keys(planned), _storage_keys(outputs)
        if func._schema.is_mutable or not output_keys <= input_keys:
            number = next(self._numbers)
            for key in input_keys | output_keys:
                self._ops_by_storage.setdefault(key, []).append(number)
            sources = [(it, _version(it)) for it in inputs if not is_unmaterialized(it)]
            args, kwargs, planned, outputs = tree_map_only(
                Tensor, Tensor.detach, (args, kwargs, planned, outputs)
            )
            operation = _RecordedOp(func, args, kwargs, planned, outputs, sources, state)
            self._operations[number] = operation
        return results

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation on values. What it writes to recorded tensors is recorded as copied."""
        real, _ = self._replay_storages(*filter(is_unmaterialized, iter_tensors((args, kwargs))))
        planned: dict[int, Tensor] = {}  # by the id of the value that it has in this call
        values = []

        def value_of(tensor: Tensor) -> Tensor:
            if not is_unmaterialized(tensor):
                return tensor
            values.append(_real_view(tensor, real))
            planned[id(values[-1])] = tensor
            return values[-1]

        args, kwargs = tree_map_only(Tensor, value_of, (args, kwargs))
        results = func(*args, **kwargs)
        for value in _written(func, args, kwargs):
            if id(value) in planned:
                self.__torch_dispatch__(_COPY, (), (planned[id(value)], value))
        return tree_map_only(Tensor, lambda it: planned.get(id(it), it), results)

    def _advance_rng(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Advances a random operation's generator; its state before, None for other operations."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        state: Tensor = _generator(kwargs).get_state()

        def real(tensor: Tensor) -> Tensor:
            # The same strides, because the count of random numbers depends on the layout.
            numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            self.scratch = self.scratch or ScratchBuffer(_CPU)
            flat = self.scratch.flat(numel, tensor.dtype)
            return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

        func(*tree_map_only(Tensor, real, args), **kwargs)
        return state

    def has_recorded(self, storage: int) -> bool:
        """Whether an operation on the storage of that id was recorded."""
        return storage in self._ops_by_storage

    def last_operation(self, tensor: Tensor) -> int | None:
        """The number of the last one that touched its storage: until it changes, so do no values.
        None if there is none."""
        return self._ops_by_storage.get(storage_id(tensor), [None])[-1]

    def replay(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The value of `tensor` after all recorded operations, as a new tensor. Raises ConfigError
        if it is not known."""
        with without_dispatch_modes(), torch.no_grad():
            real, made_elsewhere = self._replay_storages(tensor)
            value = _real_view(tensor, real)
            if made_elsewhere and value.is_floating_point() and value.isnan().any():
                raise _no_values(tensor)
            return value.to(device)

    def _replay_storages(self, *tensors: Tensor) -> tuple[dict[int, Tensor], bool]:
        """Real tensors by the storage of their meta tensors: those given, and what they needed; and
        whether one of these was not made while recording."""
        real: dict[int, Tensor] = {}
        made = [_replay_op(self._operations[it], real) for it in self._dependencies(*tensors)]
        return real, not all(made)

    def forget(self, modules: Iterable[nn.Module]) -> None:
        """Drops the operations that were needed for these modules only, or for none."""
        for module in modules:
            self.modules.pop(id(module), None)
        tensors = [
            tensor
            for module in list(self.modules.values())
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None and is_unmaterialized(tensor)
        ]
        needed = self._dependencies(*tensors)
        self._operations = {number: self._operations[number] for number in needed}
        self._ops_by_storage = {
            key: kept
            for key, numbers in self._ops_by_storage.items()
            if (kept := [it for it in numbers if it in self._operations])
        }

    def copied_from(self, tensor: Tensor) -> Tensor | None:
        """The unchanged real tensor that the last operation on its storage has copied to all of
        `tensor`; None if it has other values."""
        operation = self._operations.get(self._ops_by_storage[storage_id(tensor)][-1])
        if operation is None or operation.func is not _COPY or not operation.sources:
            return None
        target: Tensor = operation.args[0]
        (source, version), *_ = operation.sources
        whole = storage_id(target) == storage_id(tensor) and target.is_contiguous()
        same = target.shape == tensor.shape == source.shape and target.stride() == tensor.stride()
        return source if whole and same and _version(source) == version else None

    def _dependencies(self, *tensors: Tensor) -> list[int]:
        """The operations that wrote the storages, and their inputs', in recorded order."""
        pending, needed = [*map(storage_id, tensors)], set[int]()
        seen = set(pending)
        while pending:
            for number in self._ops_by_storage.get(pending.pop(), ()):
                if number not in needed:
                    needed.add(number)
                    keys = _storage_keys(self._operations[number].inputs) - seen
                    seen |= keys
                    pending += keys
        return sorted(needed)


class ValueReader(TorchFunctionMode):
    """Gives their values to functions that read tensors without an operation that can be recorded,
    such as `tolist`."""

    def __init__(self, recorder: ConstructorRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READERS and is_unmaterialized(args[0]):
            is_param, requires_grad = isinstance(args[0], nn.Parameter), args[0].requires_grad
            value = self._recorder.replay(args[0], _CPU).requires_grad_(requires_grad)
            value = nn.Parameter(value, requires_grad) if is_param else value
            with without_dispatch_modes():
                return func(value, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_COPY = torch.ops.aten.copy_.default
_READERS = {
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__),
    *(Tensor.__dlpack__, Tensor.__dlpack_device__),
}


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call of an operation writes to."""
    arguments = func._schema.arguments if func._schema.is_mutable else ()
    given = dict(zip((it.name for it in arguments), args, strict=False)) | kwargs
    names = [it.name for it in arguments if it.alias_info is not None and it.alias_info.is_write]
    return list(iter_tensors([given.get(name) for name in names]))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _replay_op(operation: _RecordedOp, real: dict[int, Tensor]) -> bool:
    """Runs an operation on real tensors and adds those it creates to `real`, by storage. False if
    it writes to what was not made while recording: that is NaN before. transformers makes resized
    embeddings so, and writes all of their rows."""
    known = True
    for written in _written(operation.func, operation.args, operation.kwargs):
        is_known = not is_unmaterialized(written) or storage_id(written) in real
        if not is_known and written.is_floating_point():
            known = False
            numel = written.untyped_storage().nbytes() // written.dtype.itemsize
            real[storage_id(written)] = torch.full((numel,), torch.nan, dtype=written.dtype)
    if any(_version(source) != version for source, version in operation.sources):
        raise ConfigError(
            f"{operation.func} was recorded inside zero_init with a tensor that has changed since",
            fix="give it a copy: tensor.clone()",
        )
    args, kwargs = tree_map_only(
        Tensor,
        lambda tensor: _real_view(tensor, real) if is_unmaterialized(tensor) else tensor,
        (operation.args, operation.kwargs),
    )
    generator = _generator(operation.kwargs)
    before = generator.get_state()
    if operation.random_state is not None:
        generator.set_state(operation.random_state)
    results = operation.func(*args, **kwargs)
    generator.set_state(before)
    for planned, result in zip(operation.outputs, iter_tensors(results), strict=True):
        real.setdefault(storage_id(planned), result)
    return known


def _generator(kwargs: dict[str, Any]) -> torch.Generator:
    return kwargs.get("generator") or torch.default_generator


def is_unmaterialized(tensor: Tensor) -> bool:
    """Whether a tensor has no memory yet. Not `is_meta`, which is hidden while recording."""
    return tensor.device.type == "meta"


def _storage_keys(tensors: Iterable[Tensor]) -> set[int]:
    return set(map(storage_id, tensors))


def _no_values(meta: Tensor) -> ConfigError:
    return ConfigError(
        f"a tensor of shape {tuple(meta.shape)} on the meta device has no values, or not in all of "
        "its elements",
        allowed="tensors made inside zero_init or zero.Init, of models that have no engine yet",
        fix="resize, replace or initialize parts of the model inside `with rayzero.zero_init():` "
        "or `with deepspeed.zero.Init():`, as the model itself",
    )


def _real_view(meta: Tensor, real: dict[int, Tensor]) -> Tensor:
    """The real counterpart of a meta tensor: the same view of the real storage, of its dtype."""
    owner = real.get(storage_id(meta))
    if owner is None:
        raise _no_values(meta)
    offset = meta.storage_offset()
    size = meta.size()
    stride = meta.stride()
    storage = owner.untyped_storage()
    view = torch.empty(0, dtype=meta.dtype).set_(storage, offset, size, stride)
    view = view.conj() if meta.is_conj() else view
    return torch._neg_view(view) if meta.is_neg() else view
