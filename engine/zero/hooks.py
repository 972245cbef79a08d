"""The hooks on autograd and nn.Module through which the engine sees gradients and blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from rayzero.engine.compiling import modules_around, untraced, whole_compile_error
from rayzero.engine.errors import EngineError
from rayzero.engine.tensor_tree import iter_tensors
from rayzero.engine.torch_private import is_compiler_active
from rayzero.engine.zero.gather_buffers import Block, BlockState
from rayzero.engine.zero.reducer import Reducer
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.unshard import UnshardScheduler

GradientHook = Callable[[Tensor], None]

_GATHER_LARGE = "rayzero.unshard_min_numel: 0 in the engine config, or "
_RETURN_TENSOR = "return the tensor from forward instead of keeping it on the module, or use "


def hook_gradients(
    units: Sequence[Unit], blocks: Sequence[Block], reducer: Reducer
) -> list[RemovableHandle]:
    """Passes every gradient to the reducer as soon as autograd has accumulated it. Each parameter
    has only one hook, since calling a hook takes about a microsecond, whatever it does."""
    block_of = {param: block for block in blocks for unit in block.units for param in unit.params}
    handles = []
    for number, unit in enumerate(units):
        for index, param in enumerate(unit.params):
            hook: GradientHook = partial(reducer.on_gradient, number, index)
            if param in block_of:
                hook = _refuse_unexpected(block_of[param], unit.layout.params[index].name, hook)
            handles.append(param.register_post_accumulate_grad_hook(hook))
    return handles


def _refuse_unexpected(block: Block, name: str, on_gradient: GradientHook) -> GradientHook:
    """Returns a hook that calls `on_gradient`, but raises EngineError for a gradient that was
    computed while its block was not gathered. Such a gradient would be wrong."""

    def on_gradient_of_block(param: Tensor) -> None:
        if block.state is not BlockState.GATHERED:
            raise EngineError(
                f"the parameter {name!r} of the block {block.name!r} got a gradient while it was "
                "not gathered",
                allowed="a block's weights in its own forward, and a loss that reaches the block "
                "through its outputs",
                fix=f"{_GATHER_LARGE if block.large else _RETURN_TENSOR}zero_optimization.stage 2",
            )
        on_gradient(param)

    return on_gradient_of_block


def hook_blocks(
    model: nn.Module, blocks: list[Block], scheduler: UnshardScheduler
) -> list[RemovableHandle]:
    """Gathers every block before its forward and before its backward."""
    around = modules_around(model, [block.module for block in blocks])

    def before(module: nn.Module, args: Any) -> None:
        if around and is_compiler_active():
            raise whole_compile_error("model")
        scheduler.root_pre_forward(around)

    # The root module's first hook, before those of a block that is the root itself.
    untraced(before, also_callees=False)
    handles = [model.register_forward_pre_hook(before, prepend=True)]
    for block in blocks:
        handles += _hook_block(block, scheduler)
    return handles


def _hook_block(block: Block, scheduler: UnshardScheduler) -> list[RemovableHandle]:
    def before(module: nn.Module, args: Any) -> None:
        scheduler.pre_forward(block)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        scheduler.post_forward(block)
        if torch.is_grad_enabled():
            for node in _new_nodes(output, (args, kwargs)):
                node.register_prehook(before_backward)

    def before_backward(_: Any) -> None:
        scheduler.pre_backward(block)

    return [
        block.module.register_forward_pre_hook(untraced(before)),
        block.module.register_forward_hook(untraced(after), with_kwargs=True, always_call=True),
    ]


def _new_nodes(output: Any, inputs: Any) -> list[Node]:
    """Returns the autograd nodes that a module made for its outputs. Leaves out nodes of inputs
    that the module passes through: their gradients arrive with those of an earlier block.
    """
    passed = [tensor.grad_fn for tensor in iter_tensors(inputs)]
    nodes: list[Node] = []
    for tensor in iter_tensors(output):
        node = tensor.grad_fn
        if node is not None and node not in passed and node not in nodes:
            nodes.append(node)
    return nodes
