"""Records the operations of a constructor on meta tensors, and replays them on real ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rayzero.engine.tensor_tree import iter_tensors, storage_id
from rayzero.engine.zero.scratch import ScratchBuffer

_CPU, _META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True)
class _RecordedOp:
    """One recorded call. A replay substitutes real tensors for meta tensors in its arguments, which
    are its `inputs`."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    outputs: list[Tensor]
    random_state: Tensor | None


class ConstructorRecorder(TorchDispatchMode):
    """Runs a constructor's operations on the meta device, and records them by the storages they
    touched.

    The recorded meta tensors keep all storages alive, so that no address is used twice.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[_RecordedOp] = []
        self._ops_by_storage: dict[int, list[int]] = {}
        self.scratch: ScratchBuffer | None = None  # while recording
        self.modules = WeakValueDictionary[int, nn.Module]()
        """By id: those that got a parameter, buffer or child while it recorded, and have no engine
        yet. A copy by `copy.deepcopy` alone is not among them."""

    def add_module(self, module: nn.Module, name: str, item: object) -> None:
        self.modules[id(module)] = module

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == _META:  # copied from a recorded tensor
            kwargs["device"] = _CPU
        inputs = list(iter_tensors((args, kwargs)))
        if func is torch.ops.aten._local_scalar_dense.default and is_unmaterialized(inputs[0]):
            return self.replay(inputs[0], _CPU).item()
        planned = list(filter(is_unmaterialized, inputs))
        creates = any(argument.name == "device" for argument in func._schema.arguments)
        if not (planned if inputs else creates):
            return func(*args, **kwargs)  # real tensors from outside are not recorded
        state = self._advance_rng(func, args, kwargs)
        on_meta = dict(kwargs, device=_META) if not inputs or "device" in kwargs else kwargs
        meta_args, meta_kwargs = tree_map_only(Tensor, lambda it: it.to(_META), (args, on_meta))
        results = func(*meta_args, **meta_kwargs)
        outputs = list(iter_tensors(results))
        input_keys, output_keys = _storage_keys(planned), _storage_keys(outputs)
        if func._schema.is_mutable or not output_keys <= input_keys:
            for key in input_keys | output_keys:
                self._ops_by_storage.setdefault(key, []).append(len(self._operations))
            self._operations.append(_RecordedOp(func, args, kwargs, planned, outputs, state))
        return results

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

    def has_recorded(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._ops_by_storage

    def replay(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The value of `tensor` after all recorded operations, as a new tensor."""
        real: dict[int, Tensor] = {}
        for number in self._dependencies(tensor):
            _replay_op(self._operations[number], real)
        return _real_view(tensor, real).to(device)

    def copied_from(self, tensor: Tensor) -> Tensor | None:
        """The real tensor whose copy is the last that was written to all of `tensor`; None if it
        has other values."""
        key = storage_id(tensor)
        for number in reversed(self._ops_by_storage.get(key, ())):
            operation = self._operations[number]
            if not operation.func._schema.is_mutable:
                if key in _storage_keys(operation.outputs) - _storage_keys(operation.inputs):
                    return None  # it was made so
                continue
            if operation.func is not torch.ops.aten.copy_.default:
                return None
            target: Tensor = operation.args[0]
            if storage_id(target) != key:
                continue  # copied to another one
            source: Tensor = operation.args[1]
            whole = target.shape == tensor.shape == source.shape and target.is_contiguous()
            return source if whole and not is_unmaterialized(source) else None
        return None

    def _dependencies(self, tensor: Tensor) -> list[int]:
        """The operations that wrote the storage, and their inputs', in recorded order."""
        pending, needed = [storage_id(tensor)], set[int]()
        seen = set(pending)
        while pending:
            for number in self._ops_by_storage.get(pending.pop(), ()):
                if number not in needed:
                    needed.add(number)
                    keys = _storage_keys(self._operations[number].inputs) - seen
                    seen |= keys
                    pending += keys
        return sorted(needed)


def _replay_op(operation: _RecordedOp, real: dict[int, Tensor]) -> None:
    """Runs an operation on real tensors and adds those it creates to `real`, by storage."""
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


def _generator(kwargs: dict[str, Any]) -> torch.Generator:
    return kwargs.get("generator") or torch.default_generator


def is_unmaterialized(tensor: Tensor) -> bool:
    """Whether a tensor has no memory yet. Not `is_meta`, which is hidden while recording."""
    return tensor.device.type == "meta"


def _storage_keys(tensors: Iterable[Tensor]) -> set[int]:
    return set(map(storage_id, tensors))


def _real_view(meta: Tensor, real: dict[int, Tensor]) -> Tensor:
    """The real counterpart of a meta tensor: the same view of the real storage."""
    return real[storage_id(meta)].as_strided(meta.size(), meta.stride(), meta.storage_offset())
