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
    """One recorded call. A replay substitutes real tensors for the meta tensors in its arguments.
    All its tensors are aliases, since the constructor may replace the data of its own tensors.

    Attributes:
        inputs: the meta tensors in its arguments.
        sources: the real tensors in its arguments, with their versions. A replay needs them
            unchanged.
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
    touched. An operation whose result depends on values, or that writes to a tensor with memory,
    runs at once.

    The recorded meta tensors keep all storages alive, so that no address is used twice.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = count()
        self._operations: dict[int, _RecordedOp] = {}
        self._ops_by_storage: dict[int, list[int]] = {}
        self.scratch: ScratchBuffer | None = None  # while recording
        self.modules = WeakValueDictionary[int, nn.Module]()
        """The modules, by id, that got a parameter, buffer or child while operations were recorded,
        and have no engine yet. A module made by `copy.deepcopy` alone is not among them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == _META:  # the device of a recorded tensor, passed on
            kwargs["device"] = _CPU
        inputs = list(iter_tensors((args, kwargs)))
        meta_inputs = list(filter(is_unmaterialized, inputs))
        creates = any(argument.name == "device" for argument in func._schema.arguments)
        if not (meta_inputs if inputs else creates):
            return func(*args, **kwargs)  # operations on real tensors only are not recorded
        needs_values = torch.Tag.data_dependent_output in func.tags
        if needs_values or not all(map(is_unmaterialized, _written(func, args, kwargs))):
            return self._run(func, args, kwargs)
        on_meta = dict(kwargs, device=_META) if not inputs or "device" in kwargs else kwargs
        meta_args, meta_kwargs = tree_map_only(
            Tensor, lambda value: value.to(_META), (args, on_meta)
        )
        try:
            results = func(*meta_args, **meta_kwargs)
        except NotImplementedError:  # no meta kernel: the result's shape depends on values
            return self._run(func, args, kwargs)
        state = self._advance_rng(func, args, kwargs)
        outputs = list(iter_tensors(results))
        input_keys, output_keys = _storage_keys(meta_inputs), _storage_keys(outputs)
        if func._schema.is_mutable or not output_keys <= input_keys:
            number = next(self._numbers)
            for key in input_keys | output_keys:
                self._ops_by_storage.setdefault(key, []).append(number)
            real_inputs = [tensor for tensor in inputs if not is_unmaterialized(tensor)]
            sources = [(tensor, _version(tensor)) for tensor in real_inputs]
            args, kwargs, meta_inputs, outputs = tree_map_only(
                Tensor, Tensor.detach, (args, kwargs, meta_inputs, outputs)
            )
            operation = _RecordedOp(func, args, kwargs, meta_inputs, outputs, sources, state)
            self._operations[number] = operation
        return results

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation on real values. If it writes to a recorded tensor, the written value is
        recorded as copied to that tensor."""
        real, _ = self._replay_storages(*filter(is_unmaterialized, iter_tensors((args, kwargs))))
        meta_of: dict[int, Tensor] = {}  # the meta tensors, by the ids of their values in this call
        values = []  # keeps the ids valid

        def value_of(tensor: Tensor) -> Tensor:
            if not is_unmaterialized(tensor):
                return tensor
            value = _real_view(tensor, real)
            values.append(value)
            meta_of[id(value)] = tensor
            return value

        args, kwargs = tree_map_only(Tensor, value_of, (args, kwargs))
        results = func(*args, **kwargs)
        for value in _written(func, args, kwargs):
            if id(value) in meta_of:
                self.__torch_dispatch__(_COPY, (), (meta_of[id(value)], value))
        return tree_map_only(Tensor, lambda value: meta_of.get(id(value), value), results)

    def _advance_rng(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Advances the generator of an operation and returns its old state. None if not random."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        state: Tensor = _generator(kwargs).get_state()

        def real(tensor: Tensor) -> Tensor:
            # With the same strides: how many random numbers are drawn depends on the layout.
            numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            self.scratch = self.scratch or ScratchBuffer(_CPU)
            flat = self.scratch.flat(numel, tensor.dtype)
            return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

        func(*tree_map_only(Tensor, real, args), **kwargs)
        return state

    def has_recorded(self, storage: int) -> bool:
        """Returns whether an operation on the storage with this id was recorded."""
        return storage in self._ops_by_storage

    def last_operation(self, tensor: Tensor) -> int | None:
        """Returns the number of the last operation that touched the tensor's storage, or None. As
        long as the number is the same, the values are."""
        return self._ops_by_storage.get(storage_id(tensor), [None])[-1]

    def replay(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Returns the value of `tensor` after all recorded operations, as a new tensor. Raises
        ConfigError if the value is not known."""
        with without_dispatch_modes(), torch.no_grad():
            real, made_elsewhere = self._replay_storages(tensor)
            value = _real_view(tensor, real)
            if made_elsewhere and value.is_floating_point() and value.isnan().any():
                raise _no_values(tensor)
            return value.to(device)

    def _replay_storages(self, *tensors: Tensor) -> tuple[dict[int, Tensor], bool]:
        """Replays the operations that the given meta tensors depend on.

        Returns:
            The real tensors by their meta tensors' storages, and whether an operation wrote to a
            tensor that was not made while recording.
        """
        real: dict[int, Tensor] = {}
        numbers = self._dependencies(*tensors)
        known = [_replay_op(self._operations[number], real) for number in numbers]
        return real, not all(known)

    def forget(self, modules: Iterable[nn.Module]) -> None:
        """Drops the operations that no recorded module other than these needs."""
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
        kept = {
            key: [number for number in numbers if number in self._operations]
            for key, numbers in self._ops_by_storage.items()
        }
        self._ops_by_storage = {key: numbers for key, numbers in kept.items() if numbers}

    def copied_from(self, tensor: Tensor) -> Tensor | None:
        """Returns the real tensor that the last operation on the storage of `tensor` copied to all
        of `tensor`. None if the last operation was another one, or the real tensor has changed."""
        operation = self._operations.get(self._ops_by_storage[storage_id(tensor)][-1])
        if operation is None or operation.func is not _COPY or not operation.sources:
            return None
        target: Tensor = operation.args[0]
        (source, version), *_ = operation.sources
        whole = storage_id(target) == storage_id(tensor) and target.is_contiguous()
        same = target.shape == tensor.shape == source.shape and target.stride() == tensor.stride()
        return source if whole and same and _version(source) == version else None

    def _dependencies(self, *tensors: Tensor) -> list[int]:
        """Returns the numbers of the operations that touched the tensors' storages or,
        transitively, those operations' inputs. In recorded order."""
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
    """Replaces recorded tensors with their values in functions that read a tensor without a
    recordable operation, such as `tolist`."""

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
    """Returns the tensors that a call of an operation writes to."""
    params = func._schema.arguments if func._schema.is_mutable else ()
    given = dict(zip((param.name for param in params), args, strict=False)) | kwargs
    written = [param.name for param in params if param.alias_info and param.alias_info.is_write]
    return list(iter_tensors([given.get(name) for name in written]))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _replay_op(operation: _RecordedOp, real: dict[int, Tensor]) -> bool:
    """Runs an operation on real tensors, and adds the tensors it creates to `real`, by storage.

    Returns False if the operation writes to a tensor that was not made while recording, which is
    NaN before. transformers makes resized embeddings so, and writes all of their rows.
    """
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
    for output, result in zip(operation.outputs, iter_tensors(results), strict=True):
        real.setdefault(storage_id(output), result)
    return known


def _generator(kwargs: dict[str, Any]) -> torch.Generator:
    return kwargs.get("generator") or torch.default_generator


def is_unmaterialized(tensor: Tensor) -> bool:
    """Returns whether a tensor has no memory yet. `is_meta` would be False while recording."""
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
    """Returns the real counterpart of a meta tensor: the same view, of the real storage."""
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
