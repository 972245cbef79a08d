"""Training data in blocks, read as a stream: each sample once at any number of workers.

The public API. Names are imported on first use: `import rayzero.data` loads neither torch, ray nor
datasets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayzero.data.hugging_face import from_hf
    from rayzero.data.ray_blocks import from_ray
    from rayzero.engine.data.streams.api import iterable, mix, stream
    from rayzero.engine.data.streams.block import BlockSource
    from rayzero.engine.data.streams.mapping import map_blocks
    from rayzero.engine.data.streams.packing import PackedBlocks, cu_seqlens
    from rayzero.engine.data.streams.positions import StreamSampler
    from rayzero.engine.data.streams.readers import IterableStream
    from rayzero.engine.data.streams.source import BlockStream
    from rayzero.engine.data.streams.sources.file_blocks import blocks

_HOMES = {
    "BlockSource": "rayzero.engine.data.streams.block",
    "BlockStream": "rayzero.engine.data.streams.source",
    "IterableStream": "rayzero.engine.data.streams.readers",
    "PackedBlocks": "rayzero.engine.data.streams.packing",
    "StreamSampler": "rayzero.engine.data.streams.positions",
    "blocks": "rayzero.engine.data.streams.sources.file_blocks",
    "cu_seqlens": "rayzero.engine.data.streams.packing",
    "from_hf": "rayzero.data.hugging_face",
    "from_ray": "rayzero.data.ray_blocks",
    "iterable": "rayzero.engine.data.streams.api",
    "map_blocks": "rayzero.engine.data.streams.mapping",
    "mix": "rayzero.engine.data.streams.api",
    "stream": "rayzero.engine.data.streams.api",
}

__all__ = [
    "BlockSource",
    "BlockStream",
    "IterableStream",
    "PackedBlocks",
    "StreamSampler",
    "blocks",
    "cu_seqlens",
    "from_hf",
    "from_ray",
    "iterable",
    "map_blocks",
    "mix",
    "stream",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rayzero.data' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
