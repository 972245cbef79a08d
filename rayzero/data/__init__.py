"""Data for streams: files, Ray datasets and Hugging Face datasets as blocks of rows.

Names are imported on first use: `import rayzero.data` loads neither torch, ray nor datasets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayzero.data.hugging_face import from_hf
    from rayzero.data.ray_blocks import from_ray
    from rayzero.engine.data.streams.sources.file_blocks import blocks

_HOMES = {
    "blocks": "rayzero.engine.data.streams.sources.file_blocks",
    "from_hf": "rayzero.data.hugging_face",
    "from_ray": "rayzero.data.ray_blocks",
}

__all__ = ["blocks", "from_hf", "from_ray"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rayzero.data' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
