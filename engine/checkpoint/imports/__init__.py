"""Reads training states in files of other systems as a `StateSource`, without unpickling objects.

| module | contents |
|---|---|
| `deepspeed` | DeepSpeed's ZeRO checkpoints: keys and layout |
| `deepspeed_files` | DeepSpeed's files, loaded without running code, and their partitions |
| `tensors` | a state made of tensors; safetensors files, one or several with an index |
"""

from __future__ import annotations

from pathlib import Path

from rayzero.engine.checkpoint.imports.deepspeed import open_deepspeed
from rayzero.engine.checkpoint.imports.tensors import TensorSource, open_safetensors
from rayzero.engine.errors import ConfigError


def open_foreign(path: str) -> TensorSource | None:
    """Opens a training state that another system wrote to the local disk: a DeepSpeed ZeRO
    checkpoint (its folder with `latest`, or the folder of one step), a safetensors file, or a
    transformers folder. Detects them by their content; returns None for any other path.

    Raises ConfigError if the path does not exist, or the kind of checkpoint is not supported;
    DataError if files or parts are missing or damaged.
    """
    if "://" in path and not path.startswith("file://"):
        return None
    place = Path(path.removeprefix("file://"))
    if not place.exists():
        raise ConfigError(f"{place} does not exist", allowed="a checkpoint's folder or file")
    return open_deepspeed(place) or open_safetensors(place)
