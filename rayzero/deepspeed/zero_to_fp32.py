"""`deepspeed.utils.zero_to_fp32`: whole fp32 weights of a checkpoint, rayzero's or DeepSpeed's."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor, nn

from rayzero.engine.checkpoint.export_model import WholeTensors, write_model_file
from rayzero.engine.checkpoint_io import open_checkpoint, resolve_checkpoint
from rayzero.engine.errors import DataError

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Returns the model's weights, floating-point ones in fp32, and its buffers, in CPU memory.

    Args:
        exclude_frozen_parameters: leave out the weights that no optimizer group has.
        lazy_mode: no effect; scripts call `contiguous()` on lazy values, which tensors have, too.
    """
    location = resolve_checkpoint(str(checkpoint_dir), tag)
    if location is None:
        raise DataError(
            f"there is no checkpoint in {checkpoint_dir}", fix="correct the folder or tag"
        )
    with closing(open_checkpoint(location)) as source:
        tensors, metadata = WholeTensors(source), source.metadata(0)
        trained = {name for group in metadata.get("groups", ()) for name in group.get("params", ())}
        weights = {
            name: _to_fp32(tensors.read(full))
            for name, full in tensors.names_of_kind("weights").items()
            if name in trained or not exclude_frozen_parameters
        }
        weights |= {
            name: tensors.read(full) for name, full in tensors.names_of_kind("buffers").items()
        }
        ties = metadata.get("ties", {})
        return weights | {name: weights[tied] for name, tied in ties.items() if tied in weights}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = None,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the weights to one file in `output_dir`: `model.safetensors` or `pytorch_model.bin`.
    `max_shard_size` has no effect: `rayzero ckpt export` writes several files."""
    weights = get_fp32_state_dict_from_zero_checkpoint(
        checkpoint_dir, tag, exclude_frozen_parameters
    )
    name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    write_model_file(weights, Path(output_dir) / name)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Loads the weights into a model without an engine; returns it on the CPU."""
    model = model.cpu()
    model.load_state_dict(
        get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False
    )
    return model


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
