"""Saves from a running engine: a checkpoint written by the ranks; the full state dict on rank 0.

A job's own checkpoints are written by its vaults in the background. `RankSaver` is for explicit
saves of a script, under torchrun or in a job; the format is the same.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.checkpoint.format import MANIFEST_NAME, is_checkpoint_file
from rayzero.engine.checkpoint.manifest import RankFile, make_manifest
from rayzero.engine.checkpoint.store import join_url, open_store
from rayzero.engine.checkpoint.writer import commit_checkpoint, write_rank_file
from rayzero.engine.comm.collectives import Collectives, run_on_all_ranks
from rayzero.engine.layout.state_index import BlockIndex
from rayzero.engine.state.ranges import pack_block
from rayzero.engine.state.training import TrainingState, copy_to_block
from rayzero.engine.zero.parameters import ShardedWeights, param_views
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.unit import Unit

LATEST_FILE = "latest"
"""The file beside the checkpoints that names the latest one."""


class RankSaver:
    """Saves one engine's state.

    Args:
        device: device of the tensors that the process group's backend communicates.
    """

    def __init__(
        self, state: TrainingState, collectives: Collectives, device: torch.device, stage: int
    ) -> None:
        self._state = state
        self._collectives = collectives
        self._device = device
        self._stage = stage

    def save(self, folder: str, tag: str, client_state: Any, *, latest: bool, frozen: bool) -> None:
        """Write `<folder>/<tag>` and return when it is durable. Collective.

        Args:
            client_state: rank 0's, encoded by `encode_client_state`.
            latest: update the file `latest`.
            frozen: include frozen parameters.

        Raises:
            StoreError: on the ranks whose write failed; EngineError on the others.
        """
        url = join_url(folder, tag)
        extra = {"client_state": client_state, "frozen": frozen}
        documents = run_on_all_ranks(
            self._collectives, self._device, lambda: self._write_own_file(url, extra, frozen)
        )
        files = [
            RankFile(**document | {"block_index": BlockIndex.from_json(document["block_index"])})
            for document in documents
        ]

        def finish() -> None:
            if self._collectives.rank:
                return
            manifest = make_manifest(tag, files[0].metadata["step"], 0, files, stage=self._stage)
            commit_checkpoint(url, manifest)
            if latest:
                open_store(folder).replace(LATEST_FILE, tag.encode())
            _remove_stale(url, {file.name for file in files})

        run_on_all_ranks(self._collectives, self._device, finish)

    def _write_own_file(self, url: str, extra: dict[str, Any], frozen: bool) -> dict[str, Any]:
        """Write this rank's file durably; returns its manifest entry."""
        _, parts, _ = self._state.describe_block(whole=False)
        if not frozen:
            parts = [part for part in parts if not part.constant]
        table, offsets = pack_block(parts)
        memory = torch.zeros(table.nbytes, dtype=torch.uint8).numpy().data
        copy_to_block(parts, offsets, memory, constants=True)
        metadata = json.loads(self._state.metadata()) | extra
        rank, world_size = self._collectives.rank, self._collectives.world_size
        written = write_rank_file(
            url, rank, table, metadata, memory, generation=0, world_size=world_size
        )
        return vars(written) | {"block_index": table.to_json()}


def _remove_stale(url: str, names: set[str]) -> None:
    """Remove files of an earlier save under the same tag, which the manifest no longer lists."""
    store = open_store(url)
    for entry in store.list_folder():
        if is_checkpoint_file(entry.name) and entry.name not in names | {MANIFEST_NAME}:
            store.remove(entry.name)


@torch.no_grad()
def full_state_dict(model: nn.Module, runtime: ZeroRuntime) -> dict[str, Tensor]:
    """The model's state dict in CPU memory on rank 0, empty on the others. Collective.

    Names, tied entries and dtypes are those of `model.state_dict()`. At most one unit at a time is
    gathered on the model's device.
    """
    whole: dict[int, Tensor] = {}  # by the parameter's identity: tied entries stay one tensor
    target = runtime.collectives.rank == 0
    for unit in runtime.units:
        values = _gather_unit(unit, runtime)
        if target and values is not None:
            whole |= {id(p): v for p, v in zip(unit.params, values, strict=True)}
    if not target:
        return {}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            value = whole.setdefault(id(tensor), tensor.detach())
            state[name] = _copy_to_cpu(value, whole, id(tensor))
    return state


def _gather_unit(unit: Unit, runtime: ZeroRuntime) -> list[Tensor] | None:
    """The unit's parameters in CPU memory, on rank 0."""
    collectives = runtime.collectives
    if not isinstance(unit.weights, ShardedWeights):
        return None
    shard = unit.weights.shard.to(unit.weights.device)  # it may be offloaded
    numel = unit.layout.numel if collectives.rank == 0 else 0
    full = shard.new_empty(numel)
    collectives.gather(full, shard).wait()
    return param_views(unit.layout, full.cpu()) if numel else None


def _copy_to_cpu(value: Tensor, whole: dict[int, Tensor], key: int) -> Tensor:
    """A copy in CPU memory, shared by all entries of a tied tensor."""
    copied = whole.get(-key)
    if copied is None:
        copied = whole[-key] = value.to("cpu", copy=True)
    return copied
