"""Prepares torch in a worker's process, so that a replacement is ready soon."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from rayzero.engine.device import get_device
from rayzero.engine.patches import replace
from rayzero.engine.torch_private import (
    is_compiler_imported,
    optimizer_methods_without_compiler,
)
from rayzero.workers.process_group import warm_up_communicator


def warm_up_torch(device: torch.device) -> None:
    """Runs one step of a tiny model: the first backward starts autograd's threads. On a GPU it also
    makes what takes a replacement seconds in its first step: the context, the libraries' handles,
    and NCCL's first communicator. Raises what the device raises: it is of no use then."""
    get_device(device).warm_up()
    if get_device(device).asynchronous:
        warm_up_communicator(device)
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.square().sum().backward()
    optimizer.step()


def defer_dynamo_import() -> None:
    """Lets torch's optimizers run without torch._dynamo until something else imports it, which
    takes a second and 100 MB.

    They import it on their first use, to keep torch.compile from tracing into them; but nothing is
    traced before somebody has imported it, which torch.compile does. May be called twice; does
    nothing with a torch whose optimizers are built differently.
    """
    for kind, name, plain in optimizer_methods_without_compiler():
        replace(kind, name, _without_dynamo(getattr(kind, name), plain))


def _without_dynamo(method: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = method if is_compiler_imported() else plain
        return chosen(*args, **kwargs)

    return call
