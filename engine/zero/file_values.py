"""Initial values that lie in a file, of which each rank reads its own ranges.

A weight loaded from a mapped safetensors file is a view of the mapping: what it says can be read
from the file instead. So rank 0 tells the others the files behind the values that it recorded, and
where all of them can read those, no rank reads or receives more of a weight than its shard, and
none has the mapping's pages in its memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.errors import EngineError
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME, dtype_name

_CHUNK_BYTES = 1 << 20  # read at a time, if it is converted or sent to a device


@dataclass(frozen=True)
class FileValues:
    """A contiguous tensor's values in a file, from byte `offset` on. `size` and `modified_ns` are
    the file's when it was mapped."""

    path: str
    offset: int
    dtype: torch.dtype
    size: int
    modified_ns: int

    def readable(self) -> bool:
        """Whether this process can read the file that was meant."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        same = (status.st_size, status.st_mtime_ns) == (self.size, self.modified_ns)
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


class MappedFiles:
    """The files that this process has mapped and not written to, as of its construction (Linux;
    none elsewhere)."""

    def __init__(self) -> None:
        self._regions: list[tuple[int, int, int, str]] = []  # start, stop, offset in the file, path
        smaps = Path("/proc/self/smaps")
        fields: list[str] = []
        for line in smaps.read_text().splitlines() if smaps.exists() else ():
            if line[0] in "0123456789abcdef":
                fields = line.split(maxsplit=5)
            elif line.startswith("Anonymous:") and line.split()[1] == "0" and len(fields) == 6:
                start, stop = (int(it, 16) for it in fields[0].split("-"))
                self._regions.append((start, stop, int(fields[2], 16), fields[5]))

    def find(self, tensor: Tensor) -> FileValues | None:
        """The place of a contiguous tensor's values in a mapped file; None if they are in none."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
            return None
        address = tensor.data_ptr()
        for start, stop, offset, path in self._regions:
            if start <= address and address + tensor.nbytes <= stop and path.startswith("/"):
                return self._describe(path, address - start + offset, tensor.dtype)
        return None

    def _describe(self, path: str, offset: int, dtype: torch.dtype) -> FileValues | None:
        try:
            status = os.stat(path)
        except OSError:  # deleted, or in shared memory
            return None
        if dtype not in DTYPE_BY_NAME.values():
            return None
        return FileValues(path, offset, dtype, status.st_size, status.st_mtime_ns)


def agree_on_files(
    found: Sequence[FileValues | None], collectives: Collectives, device: torch.device
) -> list[FileValues | None]:
    """Rank 0's files, for the parameters in order; all None if a rank cannot read one of them.
    Collective."""
    rows = [
        it and [it.path, it.offset, dtype_name(it.dtype), it.size, it.modified_ns] for it in found
    ]
    text = json.dumps(rows if any(rows) else []).encode()
    length = torch.tensor([len(text)], device=device)
    collectives.broadcast(length)
    raw = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if collectives.rank == 0:
        raw.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    collectives.broadcast(raw)
    files = [
        None if row is None else FileValues(row[0], row[1], DTYPE_BY_NAME[row[2]], row[3], row[4])
        for row in json.loads(bytes(raw.cpu().numpy()))
    ]
    names = {file.path: file for file in files if file is not None}
    if not names:
        return [None] * len(found)
    unreadable = sum(not file.readable() for file in names.values())
    none = torch.zeros(0, dtype=torch.float64, device=device)
    failed = collectives.sum_scalars(none, [float(unreadable)], "initial values")[0]
    return [None] * len(found) if failed else files
