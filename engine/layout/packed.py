"""Frozen parameters that a library has quantized, and the tensors that they consist of.

| parameter | values | scales | at stage 3 |
|---|---|---|---|
| bitsandbytes' 4-bit | in the parameter | in `quant_state` | values are sharded |
| bitsandbytes' 8-bit | in the parameter; its module has references to them | in `SCB` | whole |
| a tensor subclass, such as torchao's | in other tensors | in other tensors | whole |
| 8-bit floating point | in the parameter | in another parameter | sharded |

These parameters are never cast, because only the library knows what their bits mean. All of their
tensors belong to the state, and get rank 0's values on every rank. The parameters are recognized by
their attributes; the libraries are not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rayzero.engine.errors import ConfigError


def is_wrapper(tensor: Any) -> bool:
    """Returns whether a tensor is a subclass that consists of other tensors, without own memory."""
    return bool(is_traceable_wrapper_subclass(tensor))


def is_packed(param: Tensor) -> bool:
    """Returns whether a parameter must never be cast: its elements are 8-bit floating point, or are
    quantized, so that they are not numbers of its dtype."""
    narrow = param.dtype.is_floating_point and param.dtype.itemsize == 1
    return narrow or getattr(param, "quant_state", None) is not None or stays_whole(param)


def stays_whole(param: Tensor) -> bool:
    """Returns whether a parameter cannot become a view of a flat buffer: its memory belongs to
    other tensors, or its module has further references to the memory."""
    return is_wrapper(param) or (param.dtype is torch.int8 and hasattr(param, "SCB"))


def plain_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Returns an entry of a state dict as the state stores it: a tensor subclass becomes the
    tensors that it consists of."""
    if not is_wrapper(tensor):
        return {name: tensor}
    return {f"{name}.{path}": part for path, part in scale_tensors(tensor).items()}


def scale_tensors(param: Tensor, module: nn.Module | None = None) -> dict[str, Tensor]:
    """Returns the tensors that a quantized parameter of `module` has besides its own memory, such
    as scales, by path, as flat views of bytes."""
    if is_wrapper(param):
        found = dict(_inner_tensors(param))
    else:
        found = dict(_attributes(getattr(param, "quant_state", None)))
        # bitsandbytes moves it from the parameter to the module's state in the first forward.
        for holder in (param, getattr(module, "state", None)):
            if isinstance(scales := getattr(holder, "SCB", None), Tensor):
                found["SCB"] = scales
    return {path: _flat_bytes(tensor) for path, tensor in found.items() if tensor.numel()}


def _inner_tensors(tensor: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields (path, tensor) of the plain tensors that a tensor subclass consists of."""
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if is_wrapper(inner):
            yield from _inner_tensors(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner


def _attributes(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields (path, tensor) of a quantization state, and of the nested state of its scales."""
    for name, value in vars(state).items() if state is not None else ():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif type(value) is type(state):
            yield from _attributes(value, f"{prefix}{name}.")


def _flat_bytes(tensor: Tensor) -> Tensor:
    """Returns a tensor's memory as bytes, without reordering its dimensions: kernels may rely on
    their order."""
    if not tensor.is_contiguous() and tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor.data = tensor.contiguous()
    offset = int(tensor.storage_offset())
    return tensor.detach().as_strided((tensor.numel(),), (1,), offset).view(torch.uint8)


def place_packed(model: nn.Module, device: torch.device) -> None:
    """Moves quantized parameters to the device, as `model.to` would; bitsandbytes quantizes at that
    moment. Raises ConfigError if such a parameter is trainable or distributed, or has no values."""
    if device.type == "meta":  # a memory plan
        return
    for path, module in model.named_modules():
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
                # bitsandbytes would repack the weights into other memory in evaluation.
                vars(module)["support_avx512bf16_for_cpu"] = False


def _may_quantize(param: nn.Parameter) -> bool:
    """Returns whether bitsandbytes will quantize the parameter when it is moved."""
    if hasattr(param, "bnb_quantized"):
        return not param.bnb_quantized
    return getattr(param, "has_fp16_weights", True) is False and param.dtype is not torch.int8
