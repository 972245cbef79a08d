"""torch.compile together with the engine's hooks, without importing the compiler.

`module.compile()` and `torch.compile(module)` run the module's hooks outside the compiled frames.
A hook that is marked as `untraced` is not compiled itself, so a block is one graph. If a module
around blocks of stage 3 were compiled, the blocks' hooks would be inside its graph: such a module
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from rayzero.engine.errors import ConfigError
from rayzero.engine.patches import replace
from rayzero.engine.tensor_tree import iter_tensors
from rayzero.engine.torch_private import (
    compiled_graphs,
    disable_compiler,
    is_compile_wrapper,
    is_compiled,
    is_compiler_imported,
    mark_dynamic,
    optimizer_methods_without_compiler,
    unwrap_compiled,
)

F = TypeVar("F", bound=Callable[..., Any])

_FIX = (
    "compile the blocks instead: `for block in model.layers: block.compile()`, or compile.enabled "
    "or engine.compile(), which do so; or zero_optimization.stage 2"
)


def untraced(function: F, *, also_callees: bool = True) -> F:
    """Marks a function that torch.compile is to call without compiling or tracing it, nor, with
    `also_callees`, what it calls."""
    reason = f"rayzero gathers weights here; {_FIX}"
    return disable_compiler(function, reason, also_callees=also_callees)


def uses_compiler(model: nn.Module) -> bool:
    """Returns whether a module of the model is compiled, or torch.compile has made a graph of any
    function in this process so far."""
    return compiled_graphs() > 0 or any(map(is_compiled, model.modules()))


def modules_around(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Returns {module: name} for the modules that contain a block. torch.compile's wrapper of a
    block is not such a module."""
    inner = set(blocks)

    def contains_block(module: nn.Module) -> bool:
        return any(part in inner and part is not module for part in module.modules())

    return {
        module: name
        for name, module in model.named_modules()
        if contains_block(unwrap_compiled(module) or module)
    }


def refuse_compiled(around: Mapping[nn.Module, str]) -> None:
    """Raises ConfigError if a module around blocks of stage 3 is compiled, or if torch.compile's
    wrapper has replaced it since `around` was made. Called before each forward."""
    for module, name in around.items():
        if is_compiled(module):
            raise whole_compile_error(f"module {name!r}" if name else "model")
        for child in module._modules.values():
            if (wrapped := unwrap_compiled(child)) in around:
                raise whole_compile_error(f"module {around[wrapped]!r}")


def whole_compile_error(what: str) -> ConfigError:
    return ConfigError(
        f"the {what} is compiled as a whole at stage 3, whose weights are gathered block by block",
        fix=_FIX,
    )


def compile_in_place(
    model: nn.Module, blocks: Sequence[nn.Module], options: dict[str, Any]
) -> None:
    """Compiles a model, or its blocks if there are any; `options` are torch.compile's.

    Of nested blocks, only the innermost are compiled. A module that `torch.compile` has already
    wrapped is left as it is.
    """
    around = modules_around(model, blocks)
    for module in blocks or [model]:
        if module not in around and not is_compile_wrapper(module):
            module.compile(**options)


def keep_batch_size_dynamic(model: nn.Module, hooks: list[RemovableHandle]) -> None:
    """Lets the compiled modules of a model take another number of samples without being compiled
    again, which would delay the first step on another number of ranks.

    Hooks mark the first dimension of the modules' inputs, where it is the micro-batch's, as
    dynamic. A micro-batch of one sample has its own graph nonetheless: torch.compile treats a size
    of 1 as a constant.

    Args:
        hooks: gets the handles of the hooks: now those on the model, in the model's first forward
            those on its compiled modules. A module that is compiled later gets no hook.
    """

    def find_compiled(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module is not model:
            return  # a copy of the model has this hook, too
        first.remove()
        compiled = filter(is_compiled, model.modules())
        hooks.extend(part.register_forward_pre_hook(mark, with_kwargs=True) for part in compiled)
        if is_compiled(model):  # this forward's list of hooks was made before
            mark(model, args, kwargs)

    def mark(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        inputs = [tensor for tensor in iter_tensors((args, kwargs)) if tensor.dim() > 0]
        for tensor in inputs:
            if tensor.size(0) == inputs[0].size(0):
                mark_dynamic(tensor)

    untraced(mark)
    first = model.register_forward_pre_hook(untraced(find_compiled), with_kwargs=True)
    hooks.append(first)


def defer_dynamo_import() -> None:
    """Lets torch's optimizers run without torch._dynamo until something else imports it, which
    takes a second and 100 MB.

    The optimizers import torch._dynamo on their first use, to keep torch.compile from tracing them.
    That is too early: torch.compile itself imports it before it traces anything. May be called
    twice; does nothing with a torch whose optimizers are built differently.
    """
    for kind, name, plain in optimizer_methods_without_compiler():
        replace(kind, name, _without_dynamo(getattr(kind, name), plain))


def _without_dynamo(method: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = method if is_compiler_imported() else plain
        return chosen(*args, **kwargs)

    return call
