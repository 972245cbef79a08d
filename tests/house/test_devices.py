"""Devices are used through `engine/device.py` only, and the host reads them in few places."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from tests.house.source import Module, packages, parse, used_names

SEAM = "rayzero.engine.device"
# Other modules that call torch.cuda or torch.accelerator, and why.
DEVICE_CALLERS = {
    "rayzero.deepspeed.accelerator": "DeepSpeed's accelerator is torch.cuda under other names",
}
READS = ("item", "tolist", "cpu")
# Modules that read tensors with methods of torch, which block, and why that is right.
READERS = {
    "rayzero.engine.device": "Device.read itself, of host memory",
    "rayzero.engine.comm.collectives": "sums that Device.to_host has copied",
    "rayzero.engine.comm.gloo_p2p": "gloo's tensors are in host memory",
    "rayzero.engine.comm.shared_memory": "tensors of locations are in host memory",
    "rayzero.engine.checkpoint.imports.deepspeed": "files are loaded to host memory",
    "rayzero.engine.checkpoint_io": "a model for export, outside steps",
    "rayzero.engine.data.loader": "indices are in host memory",
    "rayzero.engine.data.sample_ledger": "indices are in host memory",
    "rayzero.engine.optim.optimizers": "LAMB counts its steps in host memory",
    "rayzero.engine.state.client_state": "the script's tensors in a checkpoint, outside steps",
    "rayzero.engine.state.metadata": "words of a random state in host memory",
    "rayzero.engine.state.save": "a full state_dict, outside steps",
    "rayzero.deepspeed.zero_to_fp32": "a model for export, outside steps",
    "rayzero.workers.function_result": "a result of the user's function",
}
COMPARED = ("cuda", "nccl")
# Modules that compare with a name of a device or backend, and why.
COMPARERS = {
    "rayzero.engine.comm.process_group": "a group's backend may be the script's choice",
    "rayzero.engine.comm.gloo_p2p": "a group that only a GPU can leave is not destroyed at exit",
    "rayzero.engine.state.metadata": "a key of saved states",
    "rayzero.workers.process_group": "NCCL's settings, and a group that the driver must end",
    "rayzero.deepspeed.accelerator": "DeepSpeed's names of devices",
}


def device_calls(module: Module) -> list[str]:
    return [
        f"{module.name}:{line} {name}"
        for line, name in used_names(module)
        if name.startswith(("torch.cuda", "torch.accelerator"))
    ]


def blocking_reads(module: Module) -> list[str]:
    return [
        f"{module.name}:{node.lineno} .{node.func.attr}()"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in READS
        and not node.args
    ]


def compared_names(module: Module) -> list[str]:
    return [
        f"{module.name}:{node.lineno}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Compare)
        and any(
            isinstance(part, ast.Constant) and part.value in COMPARED
            for part in (node.left, *node.comparators)
        )
    ]


@pytest.mark.parametrize(
    ("check", "reasons"),
    [
        (device_calls, {SEAM: "the seam", **DEVICE_CALLERS}),
        (blocking_reads, READERS),
        (compared_names, COMPARERS),
    ],
)
def test_only_these_modules_do(
    check: Callable[[Module], list[str]], reasons: dict[str, str]
) -> None:
    found = {module.name: lines for module in packages() if (lines := check(module))}
    assert {name: lines for name, lines in found.items() if name not in reasons} == {}
    assert [name for name in reasons if name not in found] == []


@pytest.mark.parametrize(
    ("check", "bad", "good"),
    [
        (device_calls, "import torch\ntorch.cuda.synchronize()", "torch.ones(1)"),
        (device_calls, "import torch\ntorch.accelerator.synchronize()", "x.cuda_graph"),
        (device_calls, "from torch.cuda import Stream", "from torch import Tensor"),
        (blocking_reads, "loss.item()", "device.read(loss)"),
        (blocking_reads, "f(x).cpu()", "x.cpu"),
        (compared_names, "device.type == 'cuda'", "device.asynchronous"),
        (compared_names, "'nccl' in name", "backend = 'nccl'"),
    ],
)
def test_check_detects_violation(check: Callable[[Module], list[str]], bad: str, good: str) -> None:
    assert check(parse("m", bad))
    assert not check(parse("m", good))
