"""What rests elsewhere in a run, as its config asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.config.zero import ZeroConfig
from rayzero.engine.layout.flat_layout import ALIGN_NUMEL
from rayzero.engine.layout.units import UnitPlan
from rayzero.engine.offload.nvme_store import NvmeStore
from rayzero.engine.offload.stores import DeviceStore, HostStore, StateStore
from rayzero.engine.offload.transfer import HostShardGather, HostTransfer, MemoryKind, make_transfer
from rayzero.engine.precision.policy import Precision


@dataclass(frozen=True)
class Offload:
    """The homes of a run, and which units live in which.

    Attributes:
        path: how shards of model weights that rest in other memory come to the device.
        home: of what is offloaded; the device's where nothing is.
        share: of the elements that are offloaded, at least, in whole units.
    """

    transfer: HostTransfer
    shard_gather: HostShardGather | None
    device_store: StateStore
    offload_store: StateStore
    offload_ratio: float

    @property
    def separate_memory(self) -> bool:
        """Whether anything rests in other memory than the device's."""
        return self.shard_gather is not None or self.offload_store.grad_transfer is not None

    def state_stores(self, plans: Sequence[UnitPlan]) -> list[StateStore]:
        """Each unit's home. The first units are offloaded: their gradients come first, and have
        the rest of backward to travel in."""
        moved = select_offloaded(plans, self.offload_ratio)
        return [self.offload_store if one else self.device_store for one in moved]

    @property
    def staging_bytes(self) -> int:
        """Host memory that pieces and copies pass through."""
        return self.transfer.staging_bytes + self.offload_store.staging_bytes

    def close(self) -> None:
        self.offload_store.close()


def select_offloaded(plans: Sequence[UnitPlan], share: float) -> list[bool]:
    """Which units are offloaded, so that they have at least `share` of the elements."""
    left = share * sum(plan.layout.logical_numel for plan in plans if plan.trainable)
    found = []
    for plan in plans:
        moved = plan.trainable and left > 0
        found.append(moved)
        left -= plan.layout.logical_numel if moved else 0
    return found


def update_chunk_numel(config: ZeroConfig) -> int:
    """The most elements that come from a file at once."""
    return max(ALIGN_NUMEL, int(config.sub_group_size) // ALIGN_NUMEL * ALIGN_NUMEL)


def plan_offload(
    config: ZeroConfig, precision: Precision, device: torch.device, collectives: Collectives
) -> Offload:
    """The homes that a config asks for; what cannot be had is refused when the config is read.

    Raises:
        ConfigError: there can be no files in the folder that it names.
    """
    link = make_transfer(device)
    weights = MemoryKind.DEVICE if config.offload_param.device == "none" else MemoryKind.HOST
    device_home = DeviceStore(precision, link, device, weights)
    asked = config.offload_optimizer
    home: StateStore = device_home
    if asked.device == "cpu":
        home = HostStore(precision, link, weights)
    elif asked.nvme_path is not None and asked.device == "nvme":
        folder, most = Path(asked.nvme_path), update_chunk_numel(config)
        home = NvmeStore(precision, link, weights, folder, asked.buffer_count, most)
    path = None
    if link.separate_memory and weights is MemoryKind.HOST:
        path = HostShardGather(link, collectives, device)
    return Offload(link, path, device_home, home, asked.ratio)
