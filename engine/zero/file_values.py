"""Initial values that lie in a file, of which each rank reads its own ranges.

`rayzero.load_pretrained` notes the files whose values it copies. Rank 0 sends their names to the
other ranks. If all ranks can read these files, no rank reads or receives more of a weight than its
shard, and no rank has pages of a file's mapping in its memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.comm.collectives import Collectives, run_on_all_ranks
from rayzero.engine.errors import EngineError
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME, dtype_name

_CHUNK_BYTES = 1 << 20  # read at a time, where values are converted or copied to a device


@dataclass(frozen=True)
class FileValues:
    """A contiguous tensor's values in a file, from byte `offset` on. `size` (bytes) and
    `modified_ns` are those of the file when its values were loaded."""

    path: str
    offset: int
    dtype: torch.dtype
    size: int
    modified_ns: int

    @property
    def version(self) -> tuple[int, int]:
        return self.size, self.modified_ns

    def readable(self) -> bool:
        """Returns whether this process can read the file, and it has not changed since."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        same = (status.st_size, status.st_mtime_ns) == self.version
        return same and os.access(self.path, os.R_OK)

    def read(self, start: int, into: Tensor) -> None:
        """Reads the elements from `start` on into a flat tensor of any dtype and device. Raises
        EngineError if the file is shorter than it was."""
        direct = into.device.type == "cpu" and into.dtype is self.dtype
        step = max(into.numel(), 1) if direct else _CHUNK_BYTES // self.dtype.itemsize
        chunk = into if direct else torch.empty(min(step, into.numel()), dtype=self.dtype)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset + start * self.dtype.itemsize)
            for begin in range(0, into.numel(), step):
                part = chunk[: min(step, into.numel() - begin)]
                raw = part.view(torch.uint8).numpy().data
                while raw:
                    count = file.readinto(raw) or 0
                    if not count:
                        raise EngineError(f"{self.path} has become shorter while it was read")
                    raw = raw[count:]
                if not direct:
                    into[begin : begin + len(part)].copy_(part)


def tensors_in_file(path: Path) -> dict[str, FileValues]:
    """Returns the tensors of a safetensors file by name, except those of unsupported dtypes."""
    status = path.stat()
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: FileValues(
            str(path.absolute()),
            8 + length + entry["data_offsets"][0],
            DTYPE_BY_NAME[entry["dtype"]],
            status.st_size,
            status.st_mtime_ns,
        )
        for name, entry in header.items()
        if entry.get("dtype") in DTYPE_BY_NAME
    }


def agree_on_files(
    found: Sequence[FileValues | None], collectives: Collectives
) -> list[FileValues | None]:
    """Returns rank 0's files for the parameters, in order. All are None if a rank cannot read one
    of the files. Collective."""
    if collectives.detached:  # an engine that is built alone, whose weights are compared
        return list(found)

    def rows_of_rank_0() -> list[list[Any] | None]:
        if collectives.rank:
            return []
        return [
            None
            if file is None
            else [file.path, file.offset, dtype_name(file.dtype), file.size, file.modified_ns]
            for file in found
        ]

    rows = run_on_all_ranks(collectives, rows_of_rank_0)[0]
    files = [
        None if row is None else FileValues(row[0], row[1], DTYPE_BY_NAME[row[2]], row[3], row[4])
        for row in rows
    ]
    needed = {file.path: file for file in files if file is not None}

    def readable() -> bool:
        return all(file.readable() for file in needed.values())

    if needed and not all(run_on_all_ranks(collectives, readable)):
        return [None] * len(found)
    return files
