"""A weights file's names as those that the model's state has.

Such a file may call a tied parameter by any of its names, or hold it under several, and keeps
buffers among weights. In the state a parameter goes by its first name, and buffers are apart.
"""

from __future__ import annotations

from torch import nn

from rayzero.engine.checkpoint.imports.tensors import TensorSource
from rayzero.engine.state.parts import kept_buffers


def use_model_names(source: TensorSource, model: nn.Module) -> None:
    """Renames what the model knows under another name; what it does not know stays as it is.

    Buffers that the model does not keep in its state dict are left out.
    """
    first = {id(param): name for name, param in model.named_parameters()}
    names: dict[str, str | None] = {
        f"weights/{name}": f"weights/{first[id(param)]}"
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    kept = {name for name, _ in kept_buffers(model)}
    for name, _ in model.named_buffers():
        names[f"weights/{name}"] = f"buffers/{name}" if name in kept else None
    source.rename(names)
