"""Deferred initialization: models are built on the meta device and materialized unit by unit.

`zero_init` records the operations of a model's constructor on the meta device. They are replayed
for one parameter at a time when the engine builds that parameter's unit. The values equal those of
an ordinary construction with the same seed: each random operation's RNG state is saved, and the
operation also runs once on a scratch tensor to advance the generator.

Method: torchdistX's `deferred_init`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.process_group import broadcast_object
from rayzero.engine.errors import ConfigError
from rayzero.engine.layout.units import UnitPlan
from rayzero.engine.patches import replaced
from rayzero.engine.tensor_tree import storage_id
from rayzero.engine.torch_private import without_dispatch_modes
from rayzero.engine.zero.file_values import FileValues, agree_on_files
from rayzero.engine.zero.recording import ConstructorRecorder, ValueReader, is_unmaterialized
from rayzero.engine.zero.shape_only import ShapeOnly

_recorder = ConstructorRecorder()  # for all models from which no engine has been built
_files: dict[int, tuple[int | None, FileValues]] = {}
"""Parameters' values in files, by storage. The number is that of the operation that copied them: a
later operation on the storage has changed the values."""


@contextmanager
def zero_init() -> Iterator[None]:
    """Builds a model without allocating its memory; the engine materializes it unit by unit.

    Example:
        >>> with rayzero.zero_init():
        ...     model = GPT(config)
        >>> engine, *_ = rayzero.initialize(model=model, config=config)

    A function given as `initialize(model=function)` is called inside this context.
    """
    with nullcontext() if _is_recording() else _record():
        yield


@contextmanager
def recording(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Records operations on tensors of a model that `zero_init` built.

    Does nothing if all tensors have memory, or inside `zero_init`, which records them anyway.
    """
    if _is_recording() or not any(map(is_recorded, tensors)):
        yield
        return
    with _record():
        yield


@torch.no_grad()
def take_initial_values(params: Iterable[nn.Parameter], source: int) -> None:
    """Makes the values that the parameters have on rank `source` their initial values, instead of
    those on rank 0. Collective, over the default process group."""
    rank = dist.get_rank()
    for param in params:
        value = _recorder.replay(param, torch.device("cpu")) if rank == source else None
        with without_dispatch_modes():  # a broadcast's own tensors must not be recorded
            value = broadcast_object(value, source)
        if rank == 0:
            with recording([param]):
                param.copy_(value)


def note_file(param: Tensor, file: FileValues) -> None:
    """Notes that the last recorded operation copied a file's values to all of a parameter."""
    _files[storage_id(param)] = _recorder.last_operation(param), file


def is_recorded(tensor: Tensor) -> bool:
    """Returns whether `zero_init` built this tensor, and no engine has been built from it."""
    return is_unmaterialized(tensor) and _recorder.has_recorded(storage_id(tensor))


def has_recordings() -> bool:
    """Returns whether a model that `zero_init` built has no engine yet."""
    return bool(_recorder.modules)


def _is_recording() -> bool:
    return "is_meta" in vars(torch.Tensor)


@contextmanager
def _record() -> Iterator[None]:
    """Records operations. Meanwhile `Tensor.is_meta` is False in all threads, because some
    functions of `torch.nn.init` skip meta tensors."""
    hooks = (
        module_hooks.register_module_parameter_registration_hook(_note_module),
        module_hooks.register_module_buffer_registration_hook(_note_module),
        module_hooks.register_module_module_registration_hook(_note_module),
    )
    try:
        not_meta = replaced(torch.Tensor, "is_meta", property(lambda _: False))
        with not_meta, _recorder, ValueReader(_recorder):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        _recorder.scratch = None


def _note_module(module: nn.Module, name: str, item: object) -> None:
    _recorder.modules[id(module)] = module
    if _defer_values not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_defer_values)


def _defer_values(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        value = state.get(prefix + name)
        is_kept = value is tensor  # by `keep_vars`
        if isinstance(value, Tensor) and not is_kept and is_recorded(value):
            state[prefix + name] = value.as_subclass(DeferredValue)


class DeferredValue(ShapeOnly):
    """A value in the `state_dict()` of a model that has no engine yet. It has no memory until it is
    read: `from_pretrained` only looks at names and shapes. Writing to it changes the model."""

    _value: Tensor | None = None
    _operation: int | None = None
    """The last recorded operation on the storage when `_value` was computed."""

    def write(self) -> AbstractContextManager[None]:
        return recording([self])

    def read(self) -> Tensor:
        """Returns the value as a real tensor, the same one for tied weights. Raises ConfigError
        after `initialize`, and on ranks whose values `initialize` will not take."""
        if not is_recorded(self):
            raise ConfigError(
                "a value of model.state_dict() was used after initialize() had taken the model",
                fix="read it before, or take engine.state_dict()",
            )
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            raise ConfigError(
                f"rank {dist.get_rank()} used a weight of a model from zero_init that has no "
                "engine",
                allowed="rank 0: its values are those that initialize gives to all ranks",
                fix="save on rank 0, or take engine.state_dict() after initialize",
            )
        operation = _recorder.last_operation(self)
        if self._value is None or self._operation != operation:
            view = (self.shape, self.stride(), self.storage_offset(), self.dtype)
            key = (storage_id(self), operation, *view)
            self._value = _values.get(key)
            if self._value is None:
                self._value = _values[key] = _recorder.replay(self, torch.device("cpu"))
            self._operation = operation
        return self._value


_values = WeakValueDictionary[tuple[Any, ...], Tensor]()  # those that a DeferredValue refers to


class Materializer:
    """Computes the initial values of a model's parameters and buffers, one at a time."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device, self._modules = device, [*model.modules()]
        self._owners = {
            id(tensor): (module, name)
            for module in self._modules
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        }
        self._last_reset: tuple[nn.Module, nn.Module] | None = None
        self._recorded = any(map(is_recorded, [*model.parameters(), *model.buffers()]))
        self._files: dict[int, FileValues | None] = {}  # by the parameter's id

    def agree_on_files(self, plans: Sequence[UnitPlan], collectives: Collectives) -> None:
        """Finds the parameters whose initial values lie in files. Collective if the model was built
        in `zero_init`, which all ranks must use or none."""
        params = [param for plan in plans for param in plan.params]
        if self._device.type == "meta" or not any(param.is_meta for param in params):
            return
        found = []
        for param in params:
            operation, file = _files.get(storage_id(param), (None, None))
            unchanged = is_recorded(param) and _recorder.last_operation(param) == operation
            found.append(file if unchanged else None)
        agreed = agree_on_files(found, collectives)
        self._files = dict(zip(map(id, params), agreed, strict=True))

    def file_of(self, param: nn.Parameter) -> FileValues | None:
        """Returns the file from which all ranks read this parameter's initial values, or None."""
        return self._files.get(id(param))

    def copy_initial_value(self, param: nn.Parameter, into: Tensor) -> None:
        """Copies a parameter's initial values to `into`. Values of a mapped file are copied from
        the mapping, without a further copy in memory."""
        source = None
        if self._device.type != "meta" and is_recorded(param):
            source = _recorder.copied_from(param)
        with torch.no_grad():
            into.copy_(self.initial_value(param) if source is None else source)

    def initial_value(self, tensor: Tensor) -> Tensor:
        """Returns a real tensor with a parameter's or buffer's initial values. Raises ConfigError
        if `tensor` is on the meta device and its initial values are unknown."""
        if not tensor.is_meta or self._device.type == "meta":
            return tensor.detach()
        if is_recorded(tensor):
            return _recorder.replay(tensor, self._device)
        return self._value_from_reset(tensor)

    def clear(self) -> None:
        """Drops the recordings of the materialized model, except those that other models need."""
        _recorder.forget(self._modules)
        for key in [key for key in _files if not _recorder.has_recorded(key)]:
            del _files[key]
        self._last_reset = None
        self._files = {}
        self._modules = []

    def _value_from_reset(self, tensor: Tensor) -> Tensor:
        """Returns the value that `reset_parameters` gives to a real copy of the owning module."""
        owner, name = self._owners[id(tensor)]
        kind, reset = type(owner).__name__, getattr(type(owner), "reset_parameters", None)
        if reset is None or self._recorded:
            reason = f"{kind} has no reset_parameters() to give its weights values"
            if (
                self._recorded
            ):  # zero_init would have recorded the tensor if it had been built there
                reason = f"moving {kind}.{name} there lost its values"
            raise ConfigError(
                f"the model is on the meta device, and {reason}",
                fix="build all of it inside rayzero.zero_init(), or pass a function as `model`",
            )
        if self._last_reset is None or self._last_reset[0] is not owner:
            real = copy.deepcopy(owner).to_empty(device=self._device)
            reset(real)
            self._last_reset = owner, real
        value: Tensor = getattr(self._last_reset[1], name)
        return value.detach()
