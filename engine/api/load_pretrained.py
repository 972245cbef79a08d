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
    """The names that only the model has, or only the files; none if `strict`.

    Attributes:
        missing: weights of the model that the files do not have; they keep their initial values.
        unexpected: weights in the files that the model does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@torch.no_grad()
def load_pretrained(model: nn.Module, path: str | Path, *, strict: bool = True) -> LoadReport:
    """Loads weights and buffers into a model that no engine has yet; call it on every rank.

    A model that `rayzero.zero_init` built gets no memory: its parameters are read by `initialize`,
    at stage 3 by each rank its own shard. A job that resumes a state, or a worker that joins after
    a fault, takes that state's values: of the files only names and shapes are read. Tied weights
    need to be in the files once. Values are converted to the model's dtypes.

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
    with without_dispatch_modes():  # also inside `zero_init`, the files' tensors are real ones
        found = load_safetensors(Path(path))
    if found is None:
        raise DataError(
            f"{path} has no weights", allowed="model.safetensors, or model.safetensors.index.json"
        )
    files = {file: tensors_in_file(file) for _, file in found.values()}
    in_state = model.state_dict(keep_vars=True).items()  # tied ones under each of their names
    own = {name: it for name, it in in_state if isinstance(it, Tensor)}
    loaded: set[int] = set()
    for name, (value, file) in found.items():
        if name in own and own[name].shape != value.shape:
            raise DataError(
                f"{path} has {name!r} of shape {tuple(value.shape)}, and the model of "
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
        wrong += [f"has {name!r}, which the model has not" for name in report.unexpected]
        raise DataError(
            f"{path} {wrong[0]}" + (f", and {len(wrong) - 1} more differ" if wrong[1:] else ""),
            fix="load_pretrained(strict=False), which reports them",
        )
    return report
