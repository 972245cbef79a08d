"""Deferred initialization: models are built on the meta device and materialized unit by unit.

`zero_init` records the operations of a model's constructor on the meta device, and replays them for
one parameter at a time when the engine builds that parameter's unit. The values equal those of an
ordinary construction with the same seed: each random operation's RNG state is saved, and the
operation also runs once on a scratch tensor to advance the generator.

Method: torchdistX's `deferred_init`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.errors import ConfigError
from rayzero.engine.zero.file_values import FileValues, MappedFiles, agree_on_files
from rayzero.engine.zero.recording import ConstructorRecorder, is_unmaterialized

_recorders: list[ConstructorRecorder] = []  # of models that no engine has been built from


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
    _recorders.append(ConstructorRecorder())
    with _record_into(_recorders[-1]):
        yield


@contextmanager
def recording(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Records operations on tensors of a model that `zero_init` built.

    Does nothing for tensors that have memory, and inside `zero_init`.
    """
    planned = list(filter(is_unmaterialized, tensors))
    recorder = next((it for it in _recorders if any(map(it.has_recorded, planned))), None)
    with nullcontext() if recorder is None or _is_recording() else _record_into(recorder):
        yield


def is_recorded(tensor: Tensor) -> bool:
    """Whether `zero_init` built this tensor, and no engine has been built from it."""
    return is_unmaterialized(tensor) and any(it.has_recorded(tensor) for it in _recorders)


def has_recordings() -> bool:
    """Whether a model that `zero_init` built waits for its engine."""
    return any(it.modules for it in _recorders)


def _is_recording() -> bool:
    return "is_meta" in vars(torch.Tensor)


@contextmanager
def _record_into(recorder: ConstructorRecorder) -> Iterator[None]:
    """Hides `is_meta` meanwhile, in all threads: some functions of `torch.nn.init` skip meta
    tensors."""
    torch.Tensor.is_meta = property(lambda _: False)  # type: ignore[assignment]
    hooks = (
        module_hooks.register_module_parameter_registration_hook(recorder.add_module),
        module_hooks.register_module_buffer_registration_hook(recorder.add_module),
        module_hooks.register_module_module_registration_hook(recorder.add_module),
    )
    try:
        with recorder:
            yield
    finally:
        for hook in hooks:
            hook.remove()
        del torch.Tensor.is_meta  # the base class's attribute is visible again
        recorder.scratch = None


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
        """Drops this model's recordings once it is materialized, unless another model was built
        with it."""
        for module in self._modules:
            for recorder in self._recorders:
                recorder.modules.pop(id(module), None)
        built = [it for it in self._recorders if not it.modules]
        _recorders[:] = [it for it in _recorders if it not in built]
        self._last_reset, self._files, self._recorders, self._modules = None, {}, [], []

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
