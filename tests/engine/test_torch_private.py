"""Each use of torch's private API: with a torch that has changed one, its test fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from rayzero.engine import torch_private
from rayzero.engine.torch_private import HashStore

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_swap_tensors():
    """Also of tensors with weak references, as `nn.LSTM` has."""
    module = nn.LSTM(2, 2)
    weight = module.weight_ih_l0
    torch_private.swap_tensors(weight, nn.Parameter(torch.full((8, 2), 3.0)))
    assert module.weight_ih_l0 is weight
    assert weight.mean() == 3.0


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_without_dispatch_modes():
    with Counting() as mode:
        with torch_private.without_dispatch_modes():
            torch.ones(1)
        assert mode.count == 0
        torch.ones(1)
    assert mode.count > 0


def test_without_torch_functions():
    class Refusing(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    tensor = torch.ones(2).as_subclass(Refusing)
    with torch_private.without_torch_functions():
        assert tensor.sum() == 2


def test_is_in_functional_transform():
    seen = []

    def function(value: Tensor) -> Tensor:
        seen.append(torch_private.is_in_functional_transform())
        return value

    torch.func.vmap(function)(torch.ones(2))
    function(torch.ones(2))
    assert seen == [True, False]


def test_is_in_backward_and_call_after_backward():
    events, weight = [], torch.ones(2, requires_grad=True)

    def on_gradient(grad: Tensor) -> None:
        events.append(torch_private.is_in_backward())
        torch_private.call_after_backward(lambda: events.append(weight.grad is not None))

    (weight * 2).register_hook(on_gradient)
    product = weight * 2
    product.register_hook(on_gradient)
    product.sum().backward()
    assert events == [True, True]
    assert not torch_private.is_in_backward()


WITHOUT_COMPILER = """
import sys, rayzero.engine.engine
assert "rayzero.engine.zero.hooks" in sys.modules
assert "torch._dynamo" not in sys.modules
import torch
from rayzero.engine import torch_private
seen = []
def hook(module, args):
    seen.append(bool(torch_private.is_compiler_active()))
torch_private.disable_compiler(hook, "the reason", also_callees=True)
assert not torch_private.is_compiler_imported()
assert torch_private.compiled_graphs() == 0
found = torch_private.optimizer_methods_without_compiler()
names = {name for _, name, _ in found}
assert names == {"add_param_group", "load_state_dict", "state_dict", "zero_grad", "step"}, names
steps = {kind: plain for kind, name, plain in found if name == "step"}
assert {torch.optim.AdamW, torch.optim.SGD} <= steps.keys()
weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
optimizer = torch.optim.SGD([weight], lr=1.0)
steps[torch.optim.SGD](optimizer)
assert weight.tolist() == [0.0, 0.0]
module = torch.nn.Linear(2, 2)
module.register_forward_pre_hook(hook)
wrapper = torch.compile(module, backend="eager")
assert torch_private.is_compiler_imported()
assert torch_private.is_compile_wrapper(wrapper) and not torch_private.is_compile_wrapper(module)
assert torch_private.unwrap_compiled(wrapper) is module
assert torch_private.unwrap_compiled(module) is None
assert torch_private.is_compiled(wrapper) and not torch_private.is_compiled(module)
module.compile(backend="eager")
assert torch_private.is_compiled(module)
for batch in (2, 3, 4):
    inputs = torch.ones(batch, 2)
    torch_private.mark_dynamic(inputs)
    module(inputs)
assert torch_private.compiled_graphs() == 1, torch_private.compiled_graphs()
assert seen, "the hook runs"
"""


def test_process_without_the_compiler():
    """The engine does not import it, nor does a hook that is neither traced nor compiled; the first
    optimizer of a class, which replaces its `step`, would."""
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr


def test_is_compiler_active():
    seen = []

    def backend(graph, inputs):
        seen.append(bool(torch_private.is_compiler_active()))
        return graph.forward

    assert not torch_private.is_compiler_active()
    torch.compile(lambda value: value + 1, backend=backend)(torch.ones(1))
    assert len(seen) == 1


def test_default_group_and_its_description(group: dist.ProcessGroup):
    assert torch_private.default_group() is group
    assert torch_private.nccl_backend([group]) is None
    assert torch_private.error_reader(group, CPU) is None
    torch_private.describe_group(group, "nccl", 3)
    assert dist.get_process_group_ranks(group) == [0, 1, 2]
    assert (dist.get_backend(), dist.get_backend_config()) == ("nccl", "cuda:nccl")


def test_use_store_for_groups(group: dist.ProcessGroup):
    store = HashStore()
    torch_private.use_store_for_groups(group, store)
    dist.new_group([0])
    first = store.num_keys()
    assert first > 0
    assert c10d._world.group_count == 2


def test_groups_newest_first_abort_and_forget(group: dist.ProcessGroup):
    made = [dist.new_group([0]) for _ in range(3)]
    assert torch_private.groups_newest_first() == made[::-1]
    torch_private.forget_group(made[0])
    assert made[0] not in c10d._world.pg_names
    assert not any(made[0] in tagged for tagged in c10d._world.tags_to_pg.values())
    torch_private.abort_groups(made[:0:-1])
    assert torch_private.groups_newest_first() == []
    assert list(c10d._world.pg_map) == [group]
    torch_private.abort_default_group()
    assert not dist.is_initialized()
