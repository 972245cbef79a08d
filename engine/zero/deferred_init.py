"""Deferred initialization as torchdistX's: models on meta are materialized unit by unit.

`zero_init` records the operations of a model's constructor on the meta device, and replays them for
one parameter at a time when the engine builds that parameter's unit. The values equal those of an
ordinary construction with the same seed: each random operation's RNG state is saved, and the
operation also runs once on a scratch tensor to advance the generator.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.errors import ConfigError
from rayzero.engine.tensor_tree import iter_tensors, storage_id
from rayzero.engine.zero.file_values import FileValues, MappedFiles, agree_on_files
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


class _Recorder(TorchDispatchMode):
    """Runs a constructor's operations on meta tensors, and records them by their storages.

    The recorded meta tensors keep all storages alive, so that no address is used twice.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[_RecordedOp] = []
        self._ops_by_storage: dict[int, list[int]] = {}
        self.scratch: ScratchBuffer | None = None  # while recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == _META:  # copied from a recorded tensor
            kwargs["device"] = _CPU
        inputs = list(iter_tensors((args, kwargs)))
        if func is torch.ops.aten._local_scalar_dense.default and _is_unmaterialized(inputs[0]):
            return self.replay(inputs[0], _CPU).item()
        planned = list(filter(_is_unmaterialized, inputs))
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
            return source if whole and not _is_unmaterialized(source) else None
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
        lambda tensor: _real_view(tensor, real) if _is_unmaterialized(tensor) else tensor,
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


def _is_unmaterialized(tensor: Tensor) -> bool:
    """Whether a tensor has no memory yet. Not `is_meta`, which is hidden while recording."""
    return tensor.device.type == "meta"


def _storage_keys(tensors: Iterable[Tensor]) -> set[int]:
    return set(map(storage_id, tensors))


def _real_view(meta: Tensor, real: dict[int, Tensor]) -> Tensor:
    """The real counterpart of a meta tensor: the same view of the real storage."""
    return real[storage_id(meta)].as_strided(meta.size(), meta.stride(), meta.storage_offset())


_recorders: list[_Recorder] = []  # of models that no engine has been built from


@contextmanager
def zero_init() -> Iterator[None]:
    """Builds a model without allocating its memory; the engine materializes it unit by unit.

    Example:
        >>> with rayzero.zero_init():
        ...     model = GPT(config)
        >>> engine, *_ = rayzero.initialize(model=model, config=config)

    A function given as `initialize(model=function)` is called inside this context.
    """
    if _is_recording():
        yield
        return
    _recorders.append(_Recorder())
    with _record_into(_recorders[-1]):
        yield


@contextmanager
def recording(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Records operations on tensors of a model that `zero_init` built.

    Does nothing for tensors that have memory, and inside `zero_init`.
    """
    planned = list(filter(_is_unmaterialized, tensors))
    recorder = next((it for it in _recorders if any(map(it.has_recorded, planned))), None)
    with nullcontext() if recorder is None or _is_recording() else _record_into(recorder):
        yield


def is_recorded(tensor: Tensor) -> bool:
    """Whether `zero_init` built this tensor, and no engine has been built from it."""
    return _is_unmaterialized(tensor) and any(it.has_recorded(tensor) for it in _recorders)


def has_recordings() -> bool:
    """Whether a model that `zero_init` built waits for its engine."""
    return bool(_recorders)


def _is_recording() -> bool:
    return "is_meta" in vars(torch.Tensor)


@contextmanager
def _record_into(recorder: _Recorder) -> Iterator[None]:
    """Hides `is_meta` meanwhile, in all threads: some functions of `torch.nn.init` skip meta
    tensors."""
    torch.Tensor.is_meta = property(lambda _: False)  # type: ignore[assignment]
    try:
        with recorder:
            yield
    finally:
        del torch.Tensor.is_meta  # the base class's attribute is visible again
        recorder.scratch = None


class Materializer:
    """Computes the initial values of a model's parameters and buffers, one at a time."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._owners = {
            id(tensor): (module, name)
            for module in model.modules()
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        }
        self._last_reset: tuple[nn.Module, nn.Module] | None = None
        tensors = [*model.parameters(), *model.buffers()]
        self._recorders = [it for it in _recorders if any(map(it.has_recorded, tensors))]
        self._files: dict[int, FileValues | None] = {}  # by a parameter's id

    def agree_on_files(self, params: Sequence[nn.Parameter], collectives: Collectives) -> None:
        """Finds the parameters whose initial values lie in files. Collective."""
        mapped, found = MappedFiles(), []
        for param in params:
            sources = (it.copied_from(param) for it in _recorders if it.has_recorded(param))
            source = next(sources, None) if param.is_meta else None
            found.append(None if source is None else mapped.find(source))
        agreed = agree_on_files(found, collectives, self._device)
        self._files = dict(zip(map(id, params), agreed, strict=True))

    def file_of(self, param: nn.Parameter) -> FileValues | None:
        """Where this parameter's initial values lie, for all ranks."""
        return self._files.get(id(param))

    def initial_value(self, tensor: Tensor) -> Tensor:
        """A real tensor with this parameter's or buffer's initial values. Raises ConfigError if it
        is on the meta device, and its initial values are unknown."""
        if not tensor.is_meta or self._device.type == "meta":
            return tensor.detach()
        for recorder in _recorders:
            if recorder.has_recorded(tensor):
                return recorder.replay(tensor, self._device).detach()
        return self._value_from_reset(tensor)

    def clear(self) -> None:
        """Drops this model's recordings once it is materialized; other contexts' models are not."""
        _recorders[:] = [it for it in _recorders if it not in self._recorders]
        self._last_reset, self._files, self._recorders = None, {}, []

    def _value_from_reset(self, tensor: Tensor) -> Tensor:
        """Calls the owning module's `reset_parameters` on a real copy of it."""
        owner, name = self._owners[id(tensor)]
        kind, reset = type(owner).__name__, getattr(type(owner), "reset_parameters", None)
        if reset is None or self._recorders:  # what zero_init built is recorded, so this had values
            lost = f"moving {kind}.{name} there lost its values"
            none = f"{kind} has no reset_parameters() to give its weights values"
            raise ConfigError(
                f"the model is on the meta device, and {lost if self._recorders else none}",
                fix="build all of it inside rayzero.zero_init(), or pass a function as `model`",
            )
        if self._last_reset is None or self._last_reset[0] is not owner:
            real = copy.deepcopy(owner).to_empty(device=self._device)
            reset(real)
            self._last_reset = owner, real
        value: Tensor = getattr(self._last_reset[1], name)
        return value.detach()
