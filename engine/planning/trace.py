"""One micro-step of a model that is not there: the bytes its activations need, and its flops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.planning.live import LiveBytes
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.trees import tensors_in

MakeBatch = Callable[[int], Any]
"""Makes a micro-batch of so many samples: a mapping of keyword arguments, or positional ones."""


@dataclass(frozen=True)
class Trace:
    """Of one rank's micro-step.

    Attributes:
        activation_bytes: the most that forward and backward hold at once beside weights and what
            `engine.memory` counts: activations, their gradients, and one gradient in passing.
        flops: of forward and backward, as `torch.utils.flop_counter` counts: matrix products,
            convolutions and attention. What a checkpoint computes again is in it.
    """

    activation_bytes: int
    flops: int


def device_at_hand() -> torch.device:
    """What operations are reckoned for: attention, for one, has other kernels on a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Tensors made within have shapes and dtypes and no memory, on the device at hand."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, device_at_hand():
        yield mode


def trace(
    model: nn.Module,
    precision: Precision,
    batch: Any,
    recomputed: Sequence[nn.Module] = (),
) -> Trace:
    """Runs forward and backward once. Within `fake_tensors`, where the model was made, too.

    Args:
        model: its parameters' dtypes are changed to what `precision` trains in.
        batch: a micro-batch.
        recomputed: modules whose forward keeps its inputs only (activation checkpointing).

    Raises:
        ConfigError: the model gives no loss, or looks at values, which are not there.
    """
    _in_dtype(model, precision)
    for module in recomputed:
        run = partial(checkpoint, module.forward, use_reentrant=False)
        object.__setattr__(module, "forward", run)
    known = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    handles = [
        param.register_post_accumulate_grad_hook(_let_go)
        for param in model.parameters()
        if param.requires_grad
    ]
    try:
        with LiveBytes(known) as live, FlopCounterMode(display=False) as flops:
            with precision.around_forward():
                loss = _loss(model, precision.cast_inputs(batch))
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
    return Trace(live.peak, flops.get_total_flops())


def _in_dtype(model: nn.Module, precision: Precision) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(precision.model_dtype(tensor.dtype))


def _let_go(param: Tensor) -> None:
    """As the engine does with a gradient once it has taken it."""
    param.grad = None


def _loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        out = model(**batch)
    elif isinstance(batch, list | tuple):
        out = model(*batch)
    else:
        out = model(batch)
    found = out if isinstance(out, Tensor) else getattr(out, "loss", None)
    if found is None:
        found = next(tensors_in(out), None)
    if found is None or not found.requires_grad:
        raise ConfigError(
            f"the model's output, a {type(out).__name__}, holds no loss to trace backward from",
            allowed="a tensor, something with a `loss`, or a tuple or dict that begins with it",
        )
    return found.float().sum()
