"""`rayzero.load_pretrained`: weights from safetensors files into a model, before `initialize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rayzero.engine.checkpoint.imports.tensors import load_safetensors
from rayzero.engine.errors import DataError
from rayzero.engine.torch_private import without_dispatch_modes
from rayzero.engine.zero.deferred_init import is_recorded, note_file, recording
from rayzero.engine.zero.file_values import tensors_in_file


@dataclass(frozen=True)
class LoadReport:
    """The names that only the model or only the files have; there are none if `strict`.

    Attributes:
        missing: weights of the model that the files do not have; they keep their initial values.
        unexpected: weights in the files that the model does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@torch.no_grad()
def load_pretrained(model: nn.Module, path: str | Path, *, strict: bool = True) -> LoadReport:
    """Loads weights and buffers into a model that no engine has yet; call it on every rank.

    A model that `rayzero.zero_init` built gets no memory here: `initialize` reads its parameters;
    at stage 3, each rank reads only its own shard. In a job that resumes from a state, and in a
    worker that joins after a fault, the values are those of that state, and only names and shapes
    are read from the files. Tied weights need to be in the files only once. Values are converted to
    the model's dtypes.

    Args:
        path: a safetensors file, or a folder with `model.safetensors` or
            `model.safetensors.index.json`. It must stay as it is until `initialize`.
        strict: refuse files that do not have exactly the model's weights.

    Raises:
        DataError: there are no such files, they are damaged, a shape differs, or, if `strict`,
            a name.

    Example:
        >>> with rayzero.zero_init():
        ...     model = GPT(config)
        >>> rayzero.load_pretrained(model, "checkpoints/gpt")
        >>> engine, *_ = rayzero.initialize(model=model, config=config)
    """
    with without_dispatch_modes():  # the files' tensors have memory, also inside `zero_init`
        found = load_safetensors(Path(path))
    if found is None:
        raise DataError(
            f"{path} has no weights", allowed="model.safetensors, or model.safetensors.index.json"
        )
    files = {file: tensors_in_file(file) for _, file in found.values()}
    state = model.state_dict(keep_vars=True)  # has a tied weight under each of its names
    own = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    loaded: set[int] = set()
    for name, (value, file) in found.items():
        if name in own and own[name].shape != value.shape:
            raise DataError(
                f"{path} has {name!r} of shape {tuple(value.shape)}, but the model has shape "
                f"{tuple(own[name].shape)}"
            )
        if name in own:
            with recording([own[name]]):
                own[name].copy_(value)
            if is_recorded(own[name]) and name in files[file]:
                note_file(own[name], files[file][name])
            loaded.add(id(own[name]))
    report = LoadReport(
        tuple(name for name, tensor in own.items() if id(tensor) not in loaded),
        tuple(name for name in found if name not in own),
    )
    if strict and (report.missing or report.unexpected):
        wrong = [f"lacks {name!r}" for name in report.missing]
        wrong += [f"has {name!r}, which the model does not have" for name in report.unexpected]
        raise DataError(
            f"{path} {wrong[0]}" + (f", and {len(wrong) - 1} more differ" if wrong[1:] else ""),
            fix="call load_pretrained(strict=False), which returns the names that differ",
        )
    return report
