"""DeepSpeed's estimates of memory for parameters, gradients and optimizer state at stages 2 and 3.

The formulas are DeepSpeed's, for mixed precision and Adam. `rayzero plan` computes what this engine
needs.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from torch import nn

_DEVICE = {True: "cpu ", False: "none"}


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Returns the number of elements of all parameters, with shared ones counted once, and of the
    largest module's own parameters."""
    own = [
        sum(param.numel() for param in module.parameters(recurse=False))
        for module in model.modules()
    ]
    return sum(param.numel() for param in model.parameters()), max(own, default=0)


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Returns bytes of each node's host memory, and of each GPU."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        host = total_params * max(4 * gpus, 16)
        return int(host * additional_buffer_factor), 2 * total_params
    host = total_params * 4 * num_gpus_per_node
    return int(host * additional_buffer_factor), 2 * total_params + int(18 * total_params / gpus)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Returns bytes of each node's host memory, of each GPU, and of the largest layer."""
    gpus, layer = num_nodes * num_gpus_per_node, 4 * largest_layer_params
    whole_model = 4 * num_gpus_per_node  # host bytes a parameter while every rank builds the model
    if not cpu_offload:
        params = largest_layer_params if zero_init else total_params
        host = params * whole_model * additional_buffer_factor
        return int(host), layer + int(18 * total_params / gpus), layer
    kept = (18 if cpu_offload_params else 16) / num_nodes
    host = total_params * (kept if zero_init else max(whole_model, kept)) * additional_buffer_factor
    gpu = layer + (0 if cpu_offload_params else int(2 * total_params / gpus))
    return int(host), gpu, layer


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates with and without an offloaded optimizer."""
    _print_head(total_params, num_gpus_per_node, num_nodes)
    for offload in (True, False):
        host, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        _print_row(host, gpu, offload_optimizer=_DEVICE[offload])


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates for what may be offloaded, with and without `zero.Init`."""
    _print_head(total_params, num_gpus_per_node, num_nodes)
    for offload, offload_params, init in product((True, False), repeat=3):
        if offload_params and not offload:
            continue
        sizes = total_params, largest_layer_params, num_gpus_per_node, num_nodes
        host, gpu, _ = estimate_zero3_model_states_mem_needs(
            *sizes, offload, offload_params, init, additional_buffer_factor
        )
        devices = {"offload_param": _DEVICE[offload_params], "offload_optimizer": _DEVICE[offload]}
        _print_row(host, gpu, **devices, zero_init=int(init))


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, *where: Any, **options: Any
) -> None:
    """Calls `..._all_cold` with the sizes of a model and the other arguments."""
    estimate_zero2_model_states_mem_needs_all_cold(_sizes(model)[0], *where, **options)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, *where: Any, **options: Any
) -> None:
    """Calls `..._all_cold` with the sizes of a model and the other arguments."""
    estimate_zero3_model_states_mem_needs_all_cold(*_sizes(model), *where, **options)


def _print_head(total_params: int, gpus: int, nodes: int) -> None:
    print(
        f"DeepSpeed's estimate for {total_params / 1e6:.0f}M parameters on {nodes} nodes of {gpus} "
        "GPUs (`rayzero plan` computes rayzero's needs):\n  host GiB | GPU GiB | options"
    )


def _print_row(host: int, gpu: int, **options: Any) -> None:
    listed = ", ".join(f"{name}={value}" for name, value in options.items())
    print(f"{host / 2**30:10.2f} | {gpu / 2**30:7.2f} | {listed}")
