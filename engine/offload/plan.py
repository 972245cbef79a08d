"""Chooses the stores of main weights and optimizer state from a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.config.zero import ZeroConfig
from rayzero.engine.layout.flat_layout import ALIGN_NUMEL
from rayzero.engine.layout.units import UnitPlan
from rayzero.engine.offload.nvme_store import MappedFile, MetaFile, NvmeStore
from rayzero.engine.offload.stores import HostStore, StateStore
from rayzero.engine.offload.transfer import HostShardGather, HostTransfer, MemoryKind, make_transfer
from rayzero.engine.precision.policy import Precision


@dataclass(frozen=True)
class Offload:
    """The stores of a run.

    Attributes:
        shard_gather: gathers model weights whose shards are outside the device; None if there are
            no such shards.
        offload_store: store of offloaded units; `device_store` if nothing is offloaded.
        weights_file: file of the shards of model weights if offload_param.device is nvme. It is
            mapped, so that the kernel reads its pages when they are used, and may evict them.
        offload_ratio: at least this share of the elements is offloaded, in whole units.
    """

    transfer: HostTransfer
    shard_gather: HostShardGather | None
    device_store: StateStore
    offload_store: StateStore
    weights_file: MappedFile | None
    offload_ratio: float

    @property
    def separate_memory(self) -> bool:
        """Whether anything is stored outside the device's memory."""
        return self.shard_gather is not None or self.offload_store.grad_transfer is not None

    def state_stores(self, plans: Sequence[UnitPlan]) -> list[StateStore]:
        """Returns each unit's store. The first units are offloaded: their gradients are ready
        first, so the copies of these gradients overlap with the rest of backward."""
        stores = []
        trained = sum(plan.layout.logical_numel for plan in plans if plan.trainable)
        remaining = self.offload_ratio * trained
        for plan in plans:
            if plan.trainable and remaining > 0:
                stores.append(self.offload_store)
                remaining -= plan.layout.logical_numel
            else:
                stores.append(self.device_store)
        return stores

    @property
    def staging_bytes(self) -> int:
        """Host memory of buffers for chunks and copies."""
        return self.transfer.staging_bytes + self.offload_store.staging_bytes

    def host_shard(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates a shard of model weights outside the device's memory."""
        if self.weights_file is not None:
            return self.weights_file.new_tensor(numel, dtype)
        return self.transfer.host_zeros(numel, dtype)

    def close(self) -> None:
        self.offload_store.close()
        if self.weights_file is not None:
            self.weights_file.close()


def plan_offload(config: ZeroConfig, precision: Precision, collectives: Collectives) -> Offload:
    """Builds the stores of a checked config. Raises ConfigError if no file can be created in
    `nvme_path`."""
    device, section = collectives.device, config.offload_optimizer
    transfer = make_transfer(device)
    offloads_weights = config.stage == 3 and config.offload_param.device != "none"
    on_host = transfer.separate_memory and offloads_weights  # model weights
    on_device = transfer.separate_memory and not on_host
    device_store = StateStore(precision, device, separate_memory=on_host)
    store = device_store
    if section.device == "cpu":
        store = HostStore(precision, transfer, separate_memory=on_device)
    elif section.nvme_path is not None and section.device == "nvme":
        file = _make_file(section.nvme_path, device)
        numel = max(ALIGN_NUMEL, int(config.sub_group_size) // ALIGN_NUMEL * ALIGN_NUMEL)
        store = NvmeStore(
            precision, transfer, file, section.buffer_count, numel, separate_memory=on_device
        )
    gather = weights_file = None
    if on_host:
        param, kind = config.offload_param, MemoryKind.HOST
        if param.device == "nvme" and param.nvme_path is not None:
            weights_file, kind = _make_file(param.nvme_path, device), MemoryKind.DISK
        gather = HostShardGather(transfer, collectives, kind)
    return Offload(transfer, gather, device_store, store, weights_file, section.ratio)


def _make_file(folder: str, device: torch.device) -> MappedFile:
    return MetaFile() if device.type == "meta" else MappedFile(Path(folder))
