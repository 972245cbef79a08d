"""Prepares torch in a worker's process, so that a replacement is ready soon."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from rayzero.engine.device import get_device
from rayzero.workers.process_group import warm_up_communicator

_NEVER_TRACED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


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
    for name in _NEVER_TRACED:
        method = getattr(Optimizer, name)
        if method.__code__.co_name == "inner":  # torch._disable_dynamo
            setattr(Optimizer, name, _without_dynamo(method, method.__wrapped__))
    for optimizer in vars(torch.optim).values():
        step = getattr(optimizer, "step", None)
        if step is not None and step.__code__.co_name == "_use_grad":
            optimizer.step = _without_dynamo(step, _with_grad_mode(step.__wrapped__))


def _without_dynamo(method: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = method if "torch._dynamo" in sys.modules else plain
        return chosen(*args, **kwargs)

    return call


def _with_grad_mode(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps as torch's `_use_grad_for_differentiable`, whose graph breaks need torch._dynamo."""

    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return call
