"""Writing versions as files of a checkpoint, behind training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from typing import TypeAlias

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.workers.messages import RankFile, SlotRef
from rayzero.workers.vault.images import MappedImage, read_small, read_table
from rayzero.workers.vault.shelf import Shelf

PATIENCE_S = 5.0
"""How long to wait for the files before: less than a poll of the vault may be late."""

WriteFile: TypeAlias = Callable[..., RankFile]
"""As `rayzero.engine.checkpoint.writer.write_rank_file`."""


class Files:
    """One file after another, in the calling thread: two would share the same disk."""

    def __init__(self, shelf: Shelf, write_file: WriteFile) -> None:
        self._shelf = shelf
        self._write_file = write_file
        self._writing = Lock()

    def write(self, folder: str, refs: Iterable[SlotRef]) -> list[RankFile]:
        """A durable file for each version, which stays as it is until then.

        Raises:
            StoreError: the store cannot take them, or has not yet taken those before.
            DataError: a version is gone or damaged.
        """
        # A store may hang for ever: whoever asks again must not hold one thread more each time.
        if not self._writing.acquire(timeout=PATIENCE_S):
            raise StoreError("slow", folder, "the vault waits for the store with earlier files")
        try:
            return [self._write(folder, ref) for ref in refs]
        finally:
            self._writing.release()

    def _write(self, folder: str, ref: SlotRef) -> RankFile:
        with self._shelf.reading(ref) as fd:
            image = MappedImage(ref, fd)
            try:
                image.verify()
                return self._write_file(
                    folder,
                    ref.rank,
                    read_table(image),
                    read_small(image),
                    image.data,
                    generation=ref.generation,
                    world_size=image.header.world_size,
                )
            finally:
                image.close()
