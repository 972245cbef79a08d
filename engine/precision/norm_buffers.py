"""Normalization modules with running statistics in fp32 and weights in 16 bits.

Buffers keep their dtype in bf16 and fp16 training. torch's batch_norm takes 16-bit inputs with fp32
statistics only if its weights are fp32 too. So while such a module runs, its weights are fp32
copies, through which autograd reaches the parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle


def hook_norms(model: nn.Module) -> list[RemovableHandle]:
    """Hooks the modules whose weights and statistics have different dtypes. These hooks run inside
    those that gather weights, which are registered before."""
    handles: list[RemovableHandle] = []
    for module in model.modules():
        if isinstance(module, _NormBase) and _differ(module):
            handles.append(module.register_forward_pre_hook(_widen))
            hook = module.register_forward_hook(_restore, prepend=True, always_call=True)
            handles.append(hook)
    return handles


def _differ(module: _NormBase) -> bool:
    mean, weight = module.running_mean, module.weight
    return mean is not None and weight is not None and weight.dtype != mean.dtype


def _widen(module: nn.Module, args: Any) -> None:
    params = module._parameters
    module.__dict__["_parameters"] = {
        name: None if param is None else param.to(torch.float32) for name, param in params.items()
    }
    module.__dict__["_narrow_parameters"] = params


def _restore(module: nn.Module, args: Any, output: Any) -> None:
    if "_narrow_parameters" in module.__dict__:
        module.__dict__["_parameters"] = module.__dict__.pop("_narrow_parameters")
