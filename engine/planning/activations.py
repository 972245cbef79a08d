"""Trace of one micro-step on fake tensors.

One micro-step of a model that is not there: the bytes its activations need, and its flops.

The most bytes that are alive at once while a piece of code runs, on tensors that are not there.

Method: every operation's outputs are seen through a dispatch mode; a storage counts from the
operation that made it until Python and autograd have let go of it. With fake tensors that costs
neither memory nor arithmetic.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.hooks import iter_tensors


class LiveBytes(TorchDispatchMode):
    """Counts storages that are made within it.

    Args:
        known: tensors whose memory is accounted for elsewhere, such as parameters.

    Attributes:
        now: bytes alive.
        peak: the most there were.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._counted = {one.untyped_storage()._cdata for one in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in iter_tensors(out):
            self._count_storage(tensor)
        return out

    def _count_storage(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._counted:
            return
        self._counted.add(key)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._on_freed, key, storage.nbytes())

    def _on_freed(self, key: int, nbytes: int) -> None:
        self._counted.discard(key)
        self.live_bytes -= nbytes


MakeBatch = Callable[[int], Any]
"""Makes a micro-batch of so many samples: a mapping of keyword arguments, or positional ones."""


@dataclass(frozen=True)
class MicroStepTrace:
    """Of one rank's micro-step.

    Attributes:
        activation_bytes: the most that forward and backward hold at once beside weights and what
            `engine.memory` counts: activations, their gradients, and one gradient in passing.
        flops: of forward and backward, as `torch.utils.flop_counter` counts: matrix products,
            convolutions and attention. What a checkpoint computes again is in it.
    """

    activation_bytes: int
    flops: int


def planning_device() -> torch.device:
    """What operations are reckoned for: attention, for one, has other kernels on a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Tensors made within have shapes and dtypes and no memory, on the device at hand."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, planning_device():
        yield mode


def trace_micro_step(
    model: nn.Module,
    precision: Precision,
    batch: Any,
    recomputed: Sequence[nn.Module] = (),
) -> MicroStepTrace:
    """Runs forward and backward once. Within `fake_tensors`, where the model was made, too.

    Args:
        model: its parameters' dtypes are changed to what `precision` trains in.
        batch: a micro-batch.
        recomputed: modules whose forward keeps its inputs only (activation checkpointing).

    Raises:
        ConfigError: the model gives no loss, or looks at values, which are not there.
    """
    _cast_model(model, precision)
    for module in recomputed:
        run = partial(checkpoint, module.forward, use_reentrant=False)
        object.__setattr__(module, "forward", run)
    known = [*model.parameters(), *model.buffers(), *iter_tensors(batch)]
    handles = [
        param.register_post_accumulate_grad_hook(_free_grad)
        for param in model.parameters()
        if param.requires_grad
    ]
    try:
        with LiveBytes(known) as live, FlopCounterMode(display=False) as flops:
            with precision.forward_context():
                loss = _find_loss(model, precision.cast_inputs(batch))
            loss.backward()
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"the model cannot be traced without data: {type(error).__name__}: {first_line(error)}",
            allowed="a forward that does not look at the values of tensors (.item(), `if tensor`)",
            fix="leave the batch out: everything but activations is worked out",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return MicroStepTrace(live.peak_bytes, flops.get_total_flops())


def _cast_model(model: nn.Module, precision: Precision) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(precision.model_dtype(tensor.dtype))


def _free_grad(param: Tensor) -> None:
    """As the engine does with a gradient once it has taken it."""
    param.grad = None


def _find_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        out = model(**batch)
    elif isinstance(batch, list | tuple):
        out = model(*batch)
    else:
        out = model(batch)
    found = out if isinstance(out, Tensor) else getattr(out, "loss", None)
    if found is None:
        found = next(iter_tensors(out), None)
    if found is None or not found.requires_grad:
        raise ConfigError(
            f"the model's output, a {type(out).__name__}, holds no loss to trace backward from",
            allowed="a tensor, something with a `loss`, or a tuple or dict that begins with it",
        )
    return found.float().sum()
