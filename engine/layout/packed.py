"""Frozen parameters that a library has quantized: what of them is memory, and how it is laid out.

| parameter | its values | scales | at stage 3 |
|---|---|---|---|
| bitsandbytes' 4-bit | in the parameter | in `quant_state` | values are sharded |
| bitsandbytes' 8-bit | in the parameter, which its module refers to as well | beside | whole |
| a tensor subclass, such as torchao's | in other tensors | in other tensors | whole |
| 8-bit floating point | in the parameter | another parameter | sharded |

None is cast: only the library knows what their bits mean. All of their tensors have rank 0's
values on every rank, and belong to the state. The libraries are known by their attributes, and are
not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rayzero.engine.errors import ConfigError


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor has no memory of its own: a subclass that is made of other tensors."""
    return bool(is_traceable_wrapper_subclass(tensor))


def is_packed(param: Tensor) -> bool:
    """Whether a parameter's elements are no numbers of its dtype, or 8-bit ones: never cast."""
    narrow = param.dtype.is_floating_point and param.dtype.itemsize == 1
    return narrow or getattr(param, "quant_state", None) is not None or stays_whole(param)


def stays_whole(param: Tensor) -> bool:
    """Whether a parameter cannot become a view of a flat buffer: its memory is other tensors', or
    its module has further references to it."""
    return is_wrapper(param) or (param.dtype is torch.int8 and hasattr(param, "SCB"))


def plain_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A state dict's entry as it is in the state: a tensor subclass as the tensors in it."""
    if not is_wrapper(tensor):
        return {name: tensor}
    return {f"{name}.{path}": part for path, part in scale_tensors(tensor).items()}


def scale_tensors(param: Tensor, module: nn.Module | None = None) -> dict[str, Tensor]:
    """The tensors that belong to the values of a parameter of `module` besides its own memory, by a
    path: flat views, as bytes."""
    if is_wrapper(param):
        found = dict(_inner_tensors(param))
    else:
        found = dict(_attributes(getattr(param, "quant_state", None)))
        for holder in (param, getattr(module, "state", None)):  # before, after the first forward
            if isinstance(scales := getattr(holder, "SCB", None), Tensor):
                found["SCB"] = scales
    return {path: _flat_bytes(tensor) for path, tensor in found.items() if tensor.numel()}


def _inner_tensors(tensor: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The plain tensors that a tensor subclass is made of."""
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if is_wrapper(inner):
            yield from _inner_tensors(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner


def _attributes(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a quantization state, also of the one in it that its scales have."""
    for name, value in vars(state).items() if state is not None else ():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif type(value) is type(state):
            yield from _attributes(value, f"{prefix}{name}.")


def _flat_bytes(tensor: Tensor) -> Tensor:
    """The tensor's own memory, whatever the order of its dimensions: kernels may need that."""
    if not tensor.is_contiguous() and tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor.data = tensor.contiguous()
    offset = int(tensor.storage_offset())
    return tensor.detach().as_strided((tensor.numel(),), (1,), offset).view(torch.uint8)


def place_packed(model: nn.Module, device: torch.device) -> None:
    """Moves quantized parameters to the device, as `model.to` would: that is also when bitsandbytes
    quantizes. Raises ConfigError if one is trainable, or has no values."""
    for path, module in model.named_modules() if device.type != "meta" else ():  # a memory plan
        for name, param in module._parameters.items():
            if param is None or not (_may_quantize(param) or is_packed(param)):
                continue
            full = f"{path}.{name}" if path else name
            if param.requires_grad or hasattr(param, "device_mesh"):  # a DTensor
                raise ConfigError(
                    f"{full}, a {type(param).__name__}, requires gradients or is distributed",
                    allowed="quantized parameters that are frozen",
                    fix="call requires_grad_(False), and train adapters such as PEFT's next to it",
                )
            if param.is_meta:
                raise ConfigError(
                    f"{full} is to be quantized ({type(param).__name__}) and has no values yet",
                    fix="build a quantized model outside of zero_init: each rank loads it",
                )
            if param.device != device or _may_quantize(param):
                module.to(device)
            if hasattr(module, "support_avx512bf16_for_cpu"):
                # bitsandbytes would repack weights in evaluation, into memory of its own.
                vars(module)["support_avx512bf16_for_cpu"] = False


def _may_quantize(param: nn.Parameter) -> bool:
    """Whether bitsandbytes quantizes it when it is moved."""
    if hasattr(param, "bnb_quantized"):
        return not param.bnb_quantized
    return getattr(param, "has_fp16_weights", True) is False and param.dtype is not torch.int8
