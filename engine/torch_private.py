"""All of torch's private API that rayzero uses: no other module names it.

One function for each use. `tests/engine/test_torch_private.py` has a test for each, which fails by
name with a torch that has changed it. Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
    Store,
    Work,
    _unregister_process_group,
)
from torch.autograd import Variable
from torch.distributed import distributed_c10d as c10d
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["HashStore", "PrefixStore", "Store", "Work"]  # typed only there

F = TypeVar("F", bound=Callable[..., Any])
_eval_frame = torch._C._dynamo.eval_frame

# Tensors and autograd


def swap_tensors(first: Tensor, second: Tensor) -> None:
    """Exchanges what two Python objects stand for. `torch.utils.swap_tensors` does the same, but
    refuses tensors with weak references."""
    torch._C._swap_tensor_impl(first, second)


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Runs operators in its body without the dispatch modes that were entered outside."""
    return _disable_current_modes()


def without_torch_functions() -> AbstractContextManager[Any]:
    """Treats subclasses of tensors as plain tensors in its body."""
    return torch._C.DisableTorchFunctionSubclass()


def is_in_functional_transform() -> bool:
    """Returns whether the calling thread is inside a transform of torch.func, such as `vmap`."""
    return torch._C._functorch.maybe_current_level() is not None


def is_in_backward() -> bool:
    """Returns whether the calling thread runs a backward: a graph task of autograd."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(function: Callable[[], None]) -> None:
    """Runs `function` at the end of the backward in which this is called. Autograd owns the
    function, and drops it if the backward fails."""
    Variable._execution_engine.queue_callback(function)


# torch.compile, without importing the compiler, which takes a second and 100 MB

is_compiler_active: Callable[[], Any] = _eval_frame.get_eval_frame_callback
"""True in a frame that torch.compile's callback sees, such as a hook of a compiled module."""


def disable_compiler(function: F, reason: str, *, also_callees: bool) -> F:
    """Keeps torch.compile from tracing a function and, if `also_callees`, what it calls, as
    `torch.compiler.disable(function, reason=reason)` does. The attribute makes a graph around the
    call break there; the mark on the code is for calls from outside of a graph."""
    marked = cast(FunctionType, function)
    marked.__dict__["_torchdynamo_disable"] = True
    marked.__dict__["_torchdynamo_disable_msg"] = reason
    action = _eval_frame._FrameAction
    callees = action.SKIP if also_callees else action.DEFAULT
    strategy = _eval_frame._FrameExecStrategy(action.SKIP, callees)
    _eval_frame.set_code_exec_strategy(marked.__code__, strategy)
    return function


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module is compiled in place, or is torch.compile's wrapper of a module."""
    return module._compiled_call_impl is not None or is_compile_wrapper(module)


def is_compile_wrapper(module: Any) -> bool:
    """Returns whether a module is the wrapper that `torch.compile(module)` returns."""
    return type(module).__name__ == "OptimizedModule"  # by name: its class is the compiler's


def unwrap_compiled(module: Any) -> Any:
    """Returns the module inside torch.compile's wrapper; None if `module` is no wrapper."""
    return module._orig_mod if is_compile_wrapper(module) else None


def is_compiler_imported() -> bool:
    return "torch._dynamo" in sys.modules


def compiled_graphs() -> int:
    """Returns the number of graphs that torch.compile has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def mark_dynamic(tensor: Tensor) -> None:
    """Lets a compiled module take another size of the tensor's first dimension without being
    compiled again; adds no constraint. Called after the compiler was imported."""
    sys.modules["torch._dynamo"].maybe_mark_dynamic(tensor, 0)


# torch's optimizers, which import the compiler on their first use

_UNTRACED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def optimizer_methods_without_compiler() -> Sequence[tuple[type, str, Callable[..., Any]]]:
    """Returns (class, name, function) for each method of torch's optimizers that imports
    torch._dynamo; `function` does the same without it. Empty if torch builds them differently."""
    found: list[tuple[type, str, Callable[..., Any]]] = []
    for name in _UNTRACED:
        method = getattr(Optimizer, name)
        if method.__code__.co_name == "inner":  # torch._disable_dynamo
            found.append((Optimizer, name, method.__wrapped__))
    for optimizer in vars(torch.optim).values():
        step = getattr(optimizer, "step", None)
        if step is not None and step.__code__.co_name == "_use_grad":
            found.append((optimizer, "step", _with_grad_mode(step.__wrapped__)))
    return found


def _with_grad_mode(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `step` as torch's `_use_grad_for_differentiable` does, but without the graph breaks,
    which need torch._dynamo."""

    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return call


# Process groups: torch's tables of them


def default_group() -> dist.ProcessGroup | None:
    return c10d._world.default_pg


def describe_group(group: dist.ProcessGroup, backend: str, world_size: int) -> None:
    """Sets what torch's functions answer about the default group."""
    world = c10d._world
    world.pg_map[group] = backend, world.pg_map[group][1]
    world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(backend)))
    world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}


def use_store_for_groups(default: dist.ProcessGroup, store: Store) -> None:
    """Lets groups that are made of the default group from now on rendezvous in `store`, under the
    names that they would have in a new process. A group's name contains a running number, which
    also counts groups that failed to form: peers that had tried fewer groups would wait under
    another name."""
    world = c10d._world
    world.pg_map[default] = world.pg_map[default][0], store
    world.group_count = 1


def groups_newest_first() -> list[dist.ProcessGroup]:
    """Returns all groups of this process but the default group, the newest first."""
    names = c10d._world.pg_names
    groups = [group for group in names if group is not c10d._world.default_pg]
    return sorted(groups, key=lambda group: str(names[group]), reverse=True)


def nccl_backend(groups: Sequence[dist.ProcessGroup]) -> Any:
    """Returns the NCCL backend of one of these groups; None if no group has one."""
    if not dist.is_nccl_available():
        return None
    for group in groups:
        with suppress(RuntimeError):
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                return backend
    return None


def error_reader(group: dist.ProcessGroup, device: torch.device) -> Callable[[], Any] | None:
    """Returns the method that returns a group's asynchronous error; None if its backend has no such
    method. Not all builds of torch's base class have it."""
    return getattr(group._get_backend(device), "get_error", None)


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Aborts groups without waiting for peers. torch forgets the groups even if an abort fails."""
    nccl = nccl_backend(groups)
    try:
        if nccl is not None:
            nccl._group_start()  # ungrouped aborts of several communicators could deadlock
        for group in groups:
            group.abort()
        if nccl is not None:
            nccl._group_end()
    finally:
        for group in groups:
            forget_group(group)


def forget_group(group: dist.ProcessGroup) -> None:
    """Removes an aborted group from torch's tables."""
    world = c10d._world
    name = world.pg_names.pop(group)
    tables: tuple[dict[Any, Any], ...] = (
        world.pg_map,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_coalesce_state,
    )
    for table in tables:
        table.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    for tagged in (world.tags_to_pg.get(tag or "", []), world.tags_to_pg.get("", [])):
        if group in tagged:
            tagged.remove(group)
    _unregister_process_group(name)


def abort_default_group() -> None:
    """Ends the default group, and the groups made of it, without waiting for peers."""
    c10d._abort_process_group()
