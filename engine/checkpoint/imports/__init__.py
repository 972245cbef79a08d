"""Open_foreign: which foreign format a path holds.

Training states in other systems' files, read as a `StateSource`. Nothing is unpickled.

| file | what it knows |
|---|---|
| `foreign` | which reader a path is for |
| `deepspeed` | DeepSpeed's ZeRO checkpoints: their files, their keys |
| `zero_layout` | where ZeRO's partitions hold which parameter: pure integers |
| `plain_pickle` | files of `torch.save`, read without running anything that is in them |
| `huggingface` | safetensors files, one or several with an index |
| `tensors` | a state that lies in tensors of any cut |
| `naming` | a file's names as those that the model's state has |

Which reader a path is for: found out from what is there, not from how it is called.
"""

from __future__ import annotations

from pathlib import Path

from rayzero.engine.checkpoint.imports.deepspeed import open_deepspeed
from rayzero.engine.checkpoint.imports.tensors import TensorSource, open_safetensors
from rayzero.engine.errors import ConfigError


def open_foreign(path: str) -> TensorSource | None:
    """A training state that another system wrote to the local disk.

    Args:
        path: a DeepSpeed ZeRO checkpoint (its folder with `latest`, or the folder of one step), a
            safetensors file, or a transformers folder.

    Returns:
        The state, or None if the path is none of these. Without an optimizer in it,
        `has_optimizer` is false.

    Raises:
        ConfigError: there is nothing at the path, or a kind of checkpoint that is not supported.
        DataError: files or parts are missing or damaged.
    """
    if "://" in path and not path.startswith("file://"):
        return None
    place = Path(path.removeprefix("file://"))
    if not place.exists():
        raise ConfigError(f"there is nothing at {place}", allowed="a checkpoint's folder or file")
    return open_deepspeed(place) or open_safetensors(place)
