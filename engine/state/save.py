"""A living engine's state as a checkpoint, written by the ranks themselves.

A job's checkpoints are written by its vaults, behind training; this is for scripts that save when
they choose to, under torchrun or in a job. The format is the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

from rayzero.engine.checkpoint.format import MANIFEST, WrittenFile, is_ours
from rayzero.engine.checkpoint.manifest import make_manifest
from rayzero.engine.checkpoint.store import join, open_store
from rayzero.engine.checkpoint.writer import commit, write_rank_file
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.messages import together
from rayzero.engine.state.parts import lay_in_block
from rayzero.engine.state.training import TrainingState, copy_out

LATEST = "latest"
"""The file beside the checkpoints that names one of them."""


class Saver:
    """Saves one engine's state.

    Args:
        device: where the group's backend can read from.
    """

    def __init__(
        self, state: TrainingState, collectives: Collectives, device: torch.device, stage: int
    ) -> None:
        self._state = state
        self._collectives = collectives
        self._device = device
        self._stage = stage

    def save(self, folder: str, tag: str, client_state: Any, *, latest: bool, frozen: bool) -> None:
        """Writes `<folder>/<tag>`; returns when it is durable. Collective.

        Args:
            client_state: rank 0's, as `client_state.encode` gives it.
            latest: the file `latest` names it from then on.
            frozen: with the frozen parameters.

        Raises:
            StoreError: the store cannot take it. EngineError on the ranks that could write.
        """
        place = join(folder, tag)
        extra = {"client_state": client_state, "frozen": frozen}
        answers = together(
            self._collectives, self._device, lambda: self._write(place, extra, frozen)
        )
        files = [WrittenFile(**(one | {"blocks": tuple(one["blocks"])})) for one in answers]

        def finish() -> None:
            if self._collectives.rank:
                return
            manifest = make_manifest(tag, files[0].small["step"], 0, files, stage=self._stage)
            commit(place, manifest)
            if latest:
                open_store(folder).replace(LATEST, tag.encode())
            _sweep(place, {one.name for one in files})

        together(self._collectives, self._device, finish)

    def _write(self, place: str, extra: dict[str, Any], frozen: bool) -> dict[str, Any]:
        """This rank's file, durable; what the manifest will say of it."""
        _, parts, _ = self._state.block(whole=False)
        if not frozen:
            parts = [part for part in parts if not part.constant]
        table, offsets = lay_in_block(parts)
        memory = torch.zeros(table.nbytes, dtype=torch.uint8).numpy().data
        copy_out(parts, offsets, memory, constants=True)
        small = json.loads(self._state.small()) | extra
        rank, world_size = self._collectives.rank, self._collectives.world_size
        written = write_rank_file(
            place, rank, table, small, memory, generation=0, world_size=world_size
        )
        return asdict(written)


def _sweep(place: str, names: set[str]) -> None:
    """What an earlier save under the same tag left: the manifest does not name it any more."""
    store = open_store(place)
    for entry in store.entries():
        if is_ours(entry.name) and entry.name not in names | {MANIFEST}:
            store.remove(entry.name)
