"""Saves from a running engine: a checkpoint that the ranks write; the full model, unit by unit.

A job's automatic checkpoints are written by its vaults in the background. `save_state` is for
explicit saves of a script, under torchrun or in a job; the format is the same. The checkpoints
(tags) in a folder share the files of frozen weights in the subfolder `base`.

Rule of ordering: `full-params` (docs/engine.md).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.checkpoint.catalogue import unused_bases
from rayzero.engine.checkpoint.format import MANIFEST_NAME, is_checkpoint_file
from rayzero.engine.checkpoint.manifest import DataFile, RankFile, make_manifest
from rayzero.engine.checkpoint.store import join_url, open_store, split_url
from rayzero.engine.checkpoint.writer import commit_checkpoint, write_rank_file
from rayzero.engine.comm.collectives import Collectives, run_on_all_ranks
from rayzero.engine.device import get_device
from rayzero.engine.layout.state_index import BlockIndex
from rayzero.engine.state.ranges import pack_block
from rayzero.engine.state.training import TrainingState
from rayzero.engine.zero.parameters import ShardedWeights, param_views
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.unit import Unit

LATEST_FILE = "latest"
"""Name of the file next to the checkpoints that contains the tag of the latest one."""


def save_state(
    state: TrainingState,
    collectives: Collectives,
    target: tuple[str, str],
    client_state: Any,
    *,
    latest: bool,
    frozen: bool,
) -> None:
    """Writes the checkpoint `target`, (folder, tag), and returns when it is durable. Collective.
    Raises StoreError on the ranks whose write failed, EngineError on the others.

    Args:
        client_state: rank 0's client state, encoded by `encode_client_state`.
        latest: whether to update the file `latest`.
        frozen: whether to include frozen parameters.
    """
    folder, tag = target
    url = join_url(folder, tag)

    def write() -> dict[str, Any]:
        ranges = [part for part in state.pack().ranges if frozen or not part.constant]
        block = pack_block(ranges)
        memory = torch.zeros(block.index.nbytes, dtype=torch.uint8).numpy().data
        block.copy_to(memory)
        metadata = json.loads(state.metadata()) | {"client_state": client_state, "frozen": frozen}
        rank, world_size = collectives.rank, collectives.world_size
        written = write_rank_file(
            url, rank, block.index, metadata, memory, generation=0, world_size=world_size
        )
        base = vars(written.base) if written.base else None
        return vars(written) | {"block_index": block.index.to_json(), "base": base}

    files = [_rank_file(document) for document in run_on_all_ranks(collectives, write)]

    def commit() -> None:
        if collectives.rank:
            return
        metadata = files[0].metadata
        manifest = make_manifest(tag, metadata["step"], 0, files, stage=metadata["stage"])
        job = open_store(split_url(url)[0])
        unused = unused_bases(job, manifest.base_names)  # by the old checkpoints and this one
        commit_checkpoint(url, manifest)
        if latest:
            open_store(folder).replace(LATEST_FILE, tag.encode())
        _remove_stale(url, {file.name for file in files})
        for entry in unused:
            job.remove(entry.name)

    run_on_all_ranks(collectives, commit)


def _rank_file(document: dict[str, Any]) -> RankFile:
    index, base = BlockIndex.from_json(document["block_index"]), document["base"]
    return RankFile(**document | {"block_index": index, "base": DataFile(**base) if base else None})


def _remove_stale(url: str, names: set[str]) -> None:
    """Removes files of an earlier save under the same tag, which the manifest no longer lists."""
    store = open_store(url)
    for entry in store.list_folder():
        if is_checkpoint_file(entry.name) and entry.name not in names | {MANIFEST_NAME}:
            store.remove(entry.name)


@torch.no_grad()
def full_state_dict(model: nn.Module, runtime: ZeroRuntime) -> dict[str, Tensor]:
    """Returns the model's state dict in CPU memory on rank 0, empty on the others. Collective.

    Names, tied entries and dtypes are those of `model.state_dict()`. At most one unit at a time is
    gathered on the model's device.
    """
    is_target = runtime.collectives.rank == 0
    gathered: dict[int, Tensor] = {}  # by the parameter's identity
    for unit in runtime.units:
        if isinstance(unit.weights, ShardedWeights):
            full = _gather_unit(unit, unit.weights, runtime.collectives, on_all_ranks=False)
            if is_target:
                values = param_views(unit.layout, full.cpu())
                gathered.update(zip(map(id, unit.params), values, strict=True))
    if not is_target:
        return {}
    copies: dict[int, Tensor] = {}  # tied entries stay one tensor
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            key = id(tensor)
            if key not in copies:
                copies[key] = gathered.get(key, tensor.detach()).to("cpu", copy=True)
            state[name] = copies[key]
    return state


@torch.no_grad()
def iterate_full_params(
    model: nn.Module, runtime: ZeroRuntime, with_peers: Callable[[Callable[[], Tensor]], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the model's parameters in full, (name, value), on every rank and on its device, in the
    order of `named_parameters()`. Collective: every rank iterates to the end.

    A sharded unit is gathered when its first parameter is due, and released after its last one. So
    memory holds the units of one block at a time, and those of parameters outside of all blocks. A
    replicated value is the engine's own memory. `with_peers` calls a function that needs all ranks.
    """
    sharded = {
        id(param): (unit, unit.weights, index)
        for unit in runtime.units
        if isinstance(unit.weights, ShardedWeights)
        for index, param in enumerate(unit.params)
    }
    params = list(model.named_parameters())
    left = Counter(sharded[id(param)][0].name for _, param in params if id(param) in sharded)
    gathered: dict[str, list[Tensor]] = {}  # by the unit's name
    for number, (name, param) in enumerate(params):
        device = get_device(param.device)
        if number == 0:
            device.synchronize()  # the consumer may be on a stream of its own
        if id(param) not in sharded:
            yield name, param.detach()
            continue
        unit, weights, index = sharded[id(param)]
        if unit.name not in gathered:
            gather = partial(_gather_unit, unit, weights, runtime.collectives, on_all_ranks=True)
            gathered[unit.name] = param_views(unit.layout, with_peers(gather))
            device.record_event().synchronize()
        value = gathered[unit.name][index]
        left[unit.name] -= 1
        if not left[unit.name]:
            del gathered[unit.name]
        device.record_use(value)
        yield name, value


def _gather_unit(
    unit: Unit, weights: ShardedWeights, collectives: Collectives, *, on_all_ranks: bool
) -> Tensor:
    """Returns the unit's flat weights on its device; an empty tensor on ranks other than 0 unless
    `on_all_ranks`."""
    shard = weights.shard.to(weights.device)  # it may be offloaded
    wanted = on_all_ranks or collectives.rank == 0
    full = shard.new_empty(unit.layout.numel if wanted else 0)
    gather = collectives.all_gather if on_all_ranks else collectives.gather
    gather(full, shard).wait()
    return full
