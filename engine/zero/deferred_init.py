"""Models that are never whole in one place: built without memory, made real unit by unit.

`zero_init` records what a model's constructor does to its tensors, on the meta device, and replays
it for one parameter at a time when the engine builds that parameter's unit. The values are those
that an ordinary construction with the same seed gives: the random state of every random operation
is kept, and the operation is carried out once on a throw-away tensor to move the generator on.

Method: deferred initialisation by recording, as torchdistX's `deferred_init` had it.
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
from rayzero.engine.zero.hooks import iter_tensors


@dataclass(frozen=True)
class _RecordedOp:
    """One recorded call. Meta tensors among the arguments stand for what a replay has in hand."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    random_state: Tensor | None

    @property
    def generator(self) -> torch.Generator:
        return self.kwargs.get("generator") or torch.default_generator


class OpRecorder:
    """What a constructor did, by the storage it was done to.

    A storage is known by its address; the recorded meta tensors keep all of them alive, so that no
    address is used twice.
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
        """The value `tensor` has after all that was recorded, as a new tensor."""
        real: dict[int, Tensor] = {}
        for number in self._dependencies(tensor):
            self._replay_op(self._operations[number], real)
        return _real_view(tensor, real).to(device)

    def _dependencies(self, tensor: Tensor) -> list[int]:
        """The operations that made the storage, and what those read, in recorded order."""
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
            lambda one: _real_view(one, real) if _is_unmaterialized(one) else one,
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
    """Memory for one tensor after another: freeing and allocating large ones tears the heap."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def flat(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of any content. The one given before must not be in use any more."""
        size = numel * dtype.itemsize
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8, device=self._memory.device)
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:size].view(dtype)


class _RecordingMode(TorchDispatchMode):
    """Runs a constructor's operations on meta, and writes them down."""

    def __init__(self, tape: OpRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = tape
        self._scratch = ScratchBuffer(torch.device("cpu"))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == torch.device("meta"):  # taken over from one of our tensors
            kwargs["device"] = torch.device("cpu")
        inputs = list(iter_tensors((args, kwargs)))
        if func is torch.ops.aten._local_scalar_dense.default and _is_unmaterialized(inputs[0]):
            return self._recorder.replay(inputs[0], torch.device("cpu")).item()
        if inputs and not any(_is_unmaterialized(one) for one in inputs):
            return func(*args, **kwargs)  # real tensors from outside stay what they are
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
        known = {_storage_key(one) for one in inputs}
        makes = [one for one in outputs if _storage_key(one) not in known]
        if makes or func._schema.is_mutable:
            self._recorder.add(_RecordedOp(func, args, kwargs, outputs, state), [*inputs, *makes])
        return results

    def _advance_rng(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """For a random operation: its generator's state before, with the generator moved on."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        generator = kwargs.get("generator") or torch.default_generator
        state: Tensor = generator.get_state()

        def real(one: Tensor) -> Tensor:
            # The same strides: how many numbers are drawn depends on the memory's layout.
            numel = one.untyped_storage().nbytes() // one.dtype.itemsize
            flat = self._scratch.flat(numel, one.dtype)
            return flat.as_strided(one.size(), one.stride(), one.storage_offset())

        func(*tree_map_only(Tensor, real, args), **kwargs)
        return state


def _is_unmaterialized(tensor: Tensor) -> bool:
    """Whether a tensor has no memory yet."""
    return tensor.device.type == "meta"


def _storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _real_view(planned: Tensor, real: dict[int, Tensor]) -> Tensor:
    """What a meta tensor stands for: the same view of its storage's real counterpart."""
    return real[_storage_key(planned)].as_strided(
        planned.size(), planned.stride(), planned.storage_offset()
    )


_recorders: list[OpRecorder] = []  # of models not yet handed to `initialize`


_active_recorders: list[OpRecorder] = []  # by the contexts that are open


@contextmanager
def zero_init() -> Iterator[None]:
    """Builds a model without its memory; `rayzero.initialize` makes it real unit by unit.

    Example:
        >>> with rayzero.zero_init():
        ...     model = GPT(config)
        >>> engine, *_ = rayzero.initialize(model=model, config=config)

    A function given as `initialize(model=function)` is called inside this context.
    """
    tape = OpRecorder()
    _recorders.append(tape)
    with _record_into(tape):
        yield


@contextmanager
def recording(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Within it, what is done to tensors of a model that `zero_init` built is recorded as well.

    Nothing for tensors that have memory, and inside `zero_init`, where everything is recorded.
    """
    planned = [one for one in tensors if _is_unmaterialized(one)]
    tapes = [tape for tape in _recorders if any(tape.has_recorded(one) for one in planned)]
    if not tapes or _active_recorders:
        yield
        return
    with _record_into(tapes[0]):
        yield


@contextmanager
def _record_into(tape: OpRecorder) -> Iterator[None]:
    _active_recorders.append(tape)
    try:
        with _RecordingMode(tape), _patched_is_meta():
            yield
    finally:
        _active_recorders.pop()


@contextmanager
def _patched_is_meta() -> Iterator[None]:
    """Some of `torch.nn.init` does nothing to a tensor that says it is on meta: here none says so.

    For all threads, as long as a model is built; nothing of torch's own depends on it meanwhile.
    """
    torch.Tensor.is_meta = property(lambda _: False)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.is_meta  # the one it hid, of the base class, is there again


class Materializer:
    """Gives the values of a model's parameters and buffers, one at a time."""

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
            ConfigError: it is on the meta device, and nothing tells its values.
        """
        if not tensor.is_meta:
            return tensor.detach()
        for tape in _recorders:
            if tape.has_recorded(tensor):
                return tape.replay(tensor, self._device).detach()
        return self._value_from_reset(tensor)

    def clear(self) -> None:
        """The model is real now: what was recorded of it is not needed any more."""
        self._last_reset = None
        _recorders.clear()

    def _value_from_reset(self, tensor: Tensor) -> Tensor:
        """From `reset_parameters` of the module that owns it, on a real copy of that module."""
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
        return (
            self._last_reset[1].get_parameter(name).detach()
            if isinstance(tensor, nn.Parameter)
            else self._last_reset[1].get_buffer(name)
        )
