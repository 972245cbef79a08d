"""A file of tensors without a name: it is gone with its process, however that ends.

Tensors at rest are mapped, so that whatever reads or loads state finds them as ordinary memory, in
pages that the kernel may take back at any time. Updates read and write with pread(2) and
pwrite(2), because a failure of those is an error, where a failure of mapped memory is a signal.
Both see the same pages.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.tensor_tree import storage_id


class MappedFile:
    """Owns one unnamed file in a folder, which is created if it is missing. It lives as long as
    this object, or a tensor in it. Raises ConfigError if no file can be created there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed in `close`
        except OSError as error:
            raise ConfigError(
                f"offload to {str(folder)!r}: {error.strerror}",
                allowed="a folder on a local disk that every worker may write to",
                fix="zero_optimization.offload_optimizer.nvme_path, or offload_param.nvme_path",
            ) from None
        self._size_bytes = 0
        self._offsets: dict[int, int] = {}  # in bytes, by the address of the storage

    def new_tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A mapped flat tensor of zeros. Its disk space is allocated at once. Raises EngineError if
        the disk is full."""
        size = -(-max(1, numel * dtype.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:  # a page that cannot be written back later would kill the process
            os.posix_fallocate(self._file.fileno(), self._size_bytes, size)
            memory = mmap.mmap(self._file.fileno(), size, offset=self._size_bytes)
        except OSError as error:
            raise self._io_error(
                f"{size} bytes after {self._size_bytes} could not be allocated", error
            ) from None
        tensor = torch.frombuffer(memory, dtype=dtype, count=numel)
        self._offsets[tensor.untyped_storage().data_ptr()] = self._size_bytes
        self._size_bytes += size
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._offsets

    def read(self, stored: Tensor, into: Tensor) -> None:
        """Copies a tensor in the file to a contiguous tensor in host memory. Raises EngineError if
        the disk failed."""
        self._copy(os.preadv, "a read failed", stored, into)

    def write(self, stored: Tensor, source: Tensor) -> None:
        """Copies a contiguous tensor in host memory to a tensor in the file. Raises EngineError if
        the disk is full, or failed."""
        self._copy(os.pwritev, "a write failed", stored, source)

    def _copy(
        self,
        call: Callable[[int, list[memoryview], int], int],
        failure: str,
        stored: Tensor,
        memory: Tensor,
    ) -> None:
        start = self._offsets[stored.untyped_storage().data_ptr()]
        offset = start + int(stored.storage_offset()) * stored.element_size()
        flat = memory.detach().view(torch.uint8)
        remaining = flat.numpy().data.cast("B") if flat.numel() else memoryview(b"")
        while remaining.nbytes:
            try:
                count = call(self._file.fileno(), [remaining], offset)
            except OSError as error:
                raise self._io_error(failure, error) from None
            if not count:
                raise self._io_error(f"the file ends at {offset} of {self._size_bytes} bytes", None)
            remaining, offset = remaining[count:], offset + count

    def close(self) -> None:
        """Closes the descriptor. The disk space is freed with the last tensor in it."""
        self._file.close()

    def _io_error(self, what: str, error: OSError | None) -> EngineError:
        reason = f": {error.strerror}" if error is not None else ""
        return EngineError(
            f"offloaded state in {str(self._folder)!r}: {what}{reason}",
            fix="zero_optimization.offload_optimizer.nvme_path: a working disk with free space "
            "(the files have no name: df shows them, ls does not), or offload_optimizer.device",
        )


class MetaFile(MappedFile):
    """No file: its tensors are on the meta device, so that only their sizes exist."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}  # by the storage's identity

    def new_tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(numel, dtype=dtype, device="meta")
        self._tensors[storage_id(tensor)] = tensor
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._tensors

    def _copy(self, *_: object) -> None:
        return

    def close(self) -> None:
        return
