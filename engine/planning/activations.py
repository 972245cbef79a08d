"""Traces one micro-step on fake tensors: peak bytes of activations, and flops.

A dispatch mode records the outputs of every operation; a storage counts from the operation that
allocates it until Python and autograd have released it. Fake tensors cost neither memory nor
arithmetic.
"""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.compiler import set_stance
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from rayzero.engine.device import local_device
from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.precision.policy import Precision
from rayzero.engine.tensor_tree import iter_tensors, storage_id
from rayzero.engine.torch_private import is_compiled

_WITHOUT_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)


_GRAPHS_ONLY = "aot_eager_decomp_partition"  # a backend without kernels


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are allocated while the mode is active, and flops.

    Flops are counted here because a `FlopCounterMode` active at the same time would change the
    bytes: it holds what activation checkpointing recomputes, and decomposes operations.

    Args:
        known: tensors that are accounted for elsewhere, such as parameters.

    Attributes:
        live_bytes: currently allocated.
        peak_bytes: maximum of `live_bytes` since the last `take_peak`.
        flops: as `torch.utils.flop_counter` counts.
    """

    supports_higher_order_operators = True  # which compiled graphs contain

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.flops = 0
        self._counted = set(map(storage_id, known))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch run compiled code in this mode, so that it is counted; torch runs eager code
        instead in a mode that does not return True."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = _run(func, *args, **(kwargs or {}))
        self._count_flops(func, args, kwargs or {}, out)
        for tensor in iter_tensors(out):
            self._count_storage(tensor)
        return out

    def _count_flops(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        if isinstance(func, HigherOrderOperator):  # runs the operation among its arguments
            operations = [i for i, arg in enumerate(args) if isinstance(arg, OpOverload)]
            inner = operations[0] if operations else None
            if inner is None:
                return
            func, args = args[inner], args[inner + 1 :]
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)

    def take_peak(self) -> int:
        """Returns the maximum of `live_bytes` since the last call."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak

    def _count_storage(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        if key in self._counted:
            return
        self._counted.add(key)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._on_freed, key, storage.nbytes())

    def _on_freed(self, key: int, nbytes: int) -> None:
        self._counted.discard(key)
        self.live_bytes -= nbytes


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    args_fp32 = bool(args) and isinstance(args[0], FakeTensor) and args[0].dtype is torch.float32
    if func is torch.ops.aten._grouped_mm.default and args_fp32:
        # Torch infers the output's shape for bf16 only.
        matrices = [matrix.bfloat16() for matrix in args[:2]]
        return func(*matrices, *args[2:], **kwargs).float()
    return func(*args, **kwargs)


def copy_without_memory(model: nn.Module, device: torch.device) -> nn.Module:
    """Returns a copy of a model on the meta device or, within `fake_tensors`, on any device."""
    memo: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        is_param = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_param else fake
    return copy.deepcopy(model, memo)


MakeBatch = Callable[[int], Any]
"""Makes a micro-batch of n samples: a mapping of keyword arguments, or positional arguments."""


@dataclass(frozen=True)
class MicroStepTrace:
    """Memory and work of one rank's micro-step.

    Attributes:
        flops: of forward and backward, as `torch.utils.flop_counter` counts: matrix products,
            convolutions and attention, including recomputation.
        grads: (parameter's name, peak bytes since the gradient before it), in the order in which
            gradients arrive. The bytes are those beside weights and what `engine.accounting`
            counts: activations, their gradients, and this parameter's gradient.
        last_bytes: the peak after the last gradient.
    """

    flops: int
    grads: tuple[tuple[str, int], ...]
    last_bytes: int

    @property
    def activation_bytes(self) -> int:
        """The peak of the micro-step if each gradient is freed as soon as it has arrived."""
        return max(self.last_bytes, *(peak for _, peak in self.grads))

    def held_grad_bytes(self, units: Sequence[Mapping[str, int]]) -> int:
        """Returns by how many bytes the peak rises because `Reducer` holds a unit's gradients until
        all gradients of this unit, and of the units before it, have arrived.

        Args:
            units: bytes of the gradients by name, in launch order.
        """
        missing = [set(unit) for unit in units]
        number = {name: index for index, unit in enumerate(units) for name in unit}
        peak = held = launched = 0
        for name, bytes_before in self.grads:
            peak = max(peak, held + bytes_before)
            unit = number[name]
            if name in missing[unit]:
                missing[unit].remove(name)
                held += units[unit][name]
            while launched < len(units) and not missing[launched]:
                held -= sum(units[launched].values())
                launched += 1
        return max(peak, held + self.last_bytes) - self.activation_bytes


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors created in this context have shapes and dtypes, but no memory.

    They are on a GPU if there is one, because some kernels, such as attention's, differ.
    """
    device, log = local_device(), logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    with FakeTensorMode(allow_non_fake_inputs=True), device, warnings.catch_warnings():
        # These warnings are about the tracing, and a run has none of them. Failures still raise.
        warnings.filterwarnings("ignore", "(?s).*(FakeTensor|almost definitely a bug)")
        log.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            log.setLevel(level)


def trace_micro_step(
    model: nn.Module, precision: Precision, batch: Any, recomputed: Sequence[nn.Module] = ()
) -> MicroStepTrace:
    """Runs forward and backward of a micro-step. Call within the `fake_tensors` that created the
    model. Raises ConfigError if the model returns no loss, or reads values, which fake tensors do
    not have.

    Compiled modules run as the graphs of AOTAutograd, whose min-cut partitioner decides what
    backward recomputes (He and Yu, "Transcending runtime-memory tradeoffs in checkpointing by being
    fusion aware", 2023). The graphs run operation by operation; fused kernels allocate less.

    Args:
        model: its parameters are cast to the dtypes of `precision`.
        batch: a micro-batch.
        recomputed: modules whose forward keeps only its inputs (activation checkpointing).
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(precision.model_dtype(tensor.dtype))
    for module in recomputed:
        run = partial(checkpoint, module.forward, use_reentrant=False)
        object.__setattr__(module, "forward", run)
    known = [*model.parameters(), *model.buffers(), *iter_tensors(batch)]

    def compute_loss() -> Tensor:
        with precision.forward_context():
            return _find_loss(model, precision.cast_inputs(batch))

    try:
        return _trace(model, compute_loss, known)
    except _WITHOUT_VALUES as error:
        raise ConfigError(
            f"the model cannot be traced without data: {type(error).__name__}: {first_line(error)}",
            allowed="a forward that does not read the values of tensors (.item(), `if tensor`)",
            fix="leave the batch out: everything but activations is estimated",
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            f"forward or backward of the model failed on its batch: {first_line(error)}",
            allowed="a batch that the model takes, here without values (fake tensors)",
            fix="correct the function of --batch, or leave it out: the rest is estimated",
        ) from error


def _trace(
    model: nn.Module, compute_loss: Callable[[], Tensor], known: Iterable[Tensor]
) -> MicroStepTrace:
    live = LiveBytes(known)
    grads: list[tuple[str, int]] = []

    def on_grad(name: str, param: Tensor) -> None:
        grads.append((name, live.take_peak()))
        param.grad = None

    handles = [
        param.register_post_accumulate_grad_hook(partial(on_grad, name))
        for name, param in model.named_parameters()
        if param.requires_grad
    ]
    try:
        with set_stance("default", force_backend=_GRAPHS_ONLY):
            if any(map(is_compiled, model.modules())):
                torch.compiler.reset()  # earlier models count towards torch's recompile limit
                compute_loss().backward()
                grads.clear()
            with live:
                compute_loss().backward()
    finally:
        for handle in handles:
            handle.remove()
    return MicroStepTrace(live.flops, tuple(grads), live.take_peak())


def _find_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        out = model(**batch)
    elif isinstance(batch, list | tuple):
        out = model(*batch)
    else:
        out = model(batch)
    loss = getattr(out, "loss", None)
    loss = next(iter_tensors(out), None) if loss is None else loss
    if loss is None or not loss.requires_grad:
        raise ConfigError(
            f"the model's output, a {type(out).__name__}, contains no loss to trace backward from",
            allowed="a tensor, an object with a `loss`, or a tuple or dict that begins with it",
        )
    return loss.float().sum()
