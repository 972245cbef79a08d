"""The hooks on autograd and nn.Module through which the engine sees gradients and blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from rayzero.engine.compiling import (
    compiler_active,
    modules_around,
    untraced,
    whole_compile_error,
)
from rayzero.engine.errors import EngineError
from rayzero.engine.tensor_tree import iter_tensors
from rayzero.engine.zero.gather_buffers import Block, BlockState
from rayzero.engine.zero.reducer import Reducer
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.unshard import UnshardScheduler


def hook_gradients(units: list[Unit], reducer: Reducer) -> list[RemovableHandle]:
    """Passes every gradient to the reducer as soon as autograd has accumulated it."""
    return [
        param.register_post_accumulate_grad_hook(partial(reducer.on_gradient, number, index))
        for number, unit in enumerate(units)
        for index, param in enumerate(unit.params)
    ]


def hook_blocks(
    model: nn.Module, blocks: list[Block], scheduler: UnshardScheduler
) -> list[RemovableHandle]:
    """Gathers every block before its forward and before its backward."""
    around = modules_around(model, [block.module for block in blocks])

    def before(module: nn.Module, args: Any) -> None:
        if around and compiler_active():
            raise whole_compile_error("model")
        scheduler.root_pre_forward(around)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        scheduler.root_post_forward()

    # The root module's first hook, before those of a block that is the root itself.
    untraced(before, also_callees=False)
    handles = [
        model.register_forward_pre_hook(before, prepend=True),
        model.register_forward_hook(untraced(after), always_call=True),
    ]
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
        *_hook_unexpected_grads(block),
    ]


def _hook_unexpected_grads(block: Block) -> list[RemovableHandle]:
    """Refuses a gradient that was computed while its block was not gathered: it would be wrong."""

    def check(param: Tensor) -> None:
        if block.state is not BlockState.GATHERED:
            raise EngineError(
                f"a parameter of the block {block.name!r} got a gradient while it was not gathered",
                allowed="the loss reaches a block through what its forward returns",
                fix="return the tensor from forward instead of keeping it on the module, or use "
                "zero_optimization.stage 2",
            )

    return [
        param.register_post_accumulate_grad_hook(check)
        for unit in block.units
        for param in unit.params
        if param.requires_grad
    ]


def _new_nodes(output: Any, inputs: Any) -> list[Node]:
    """The nodes of the graph that a module has made for its outputs, not those of inputs that it
    passes through: their gradient arrives with that of an earlier block.
    """
    passed = [tensor.grad_fn for tensor in iter_tensors(inputs)]
    nodes: list[Node] = []
    for tensor in iter_tensors(output):
        node = tensor.grad_fn
        if node is not None and node not in passed and node not in nodes:
            nodes.append(node)
    return nodes
