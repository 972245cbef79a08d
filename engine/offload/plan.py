"""What rests elsewhere in a run, as its config asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.config.zero import ZeroConfig
from rayzero.engine.layout.partition import ALIGN
from rayzero.engine.layout.units import UnitPlan
from rayzero.engine.offload.disk_home import DiskHome
from rayzero.engine.offload.home import DeviceHome, Home, HostHome
from rayzero.engine.offload.link import Link, link_for
from rayzero.engine.offload.place import Place
from rayzero.engine.offload.weights import HostPath
from rayzero.engine.precision.policy import Precision


@dataclass(frozen=True)
class Offload:
    """The homes of a run, and which units live in which.

    Attributes:
        path: how shards of model weights that rest in other memory come to the device.
        home: of what is offloaded; the device's where nothing is.
        share: of the elements that are offloaded, at least, in whole units.
    """

    link: Link
    path: HostPath | None
    device_home: Home
    home: Home
    share: float

    @property
    def moves(self) -> bool:
        """Whether anything rests in other memory than the device's."""
        return self.path is not None or self.home.fetches is not None

    def homes(self, plans: Sequence[UnitPlan]) -> list[Home]:
        """Each unit's home. The first units are offloaded: their gradients come first, and have
        the rest of backward to travel in."""
        moved = moves(plans, self.share)
        return [self.home if one else self.device_home for one in moved]

    @property
    def staging_bytes(self) -> int:
        """Host memory that pieces and copies pass through."""
        return self.link.staging_bytes + self.home.staging_bytes

    def close(self) -> None:
        self.home.close()


def moves(plans: Sequence[UnitPlan], share: float) -> list[bool]:
    """Which units are offloaded, so that they have at least `share` of the elements."""
    left = share * sum(plan.layout.logical_numel for plan in plans if plan.trainable)
    found = []
    for plan in plans:
        moved = plan.trainable and left > 0
        found.append(moved)
        left -= plan.layout.logical_numel if moved else 0
    return found


def piece_numel(config: ZeroConfig) -> int:
    """The most elements that come from a file at once."""
    return max(ALIGN, int(config.sub_group_size) // ALIGN * ALIGN)


def plan_offload(
    config: ZeroConfig, precision: Precision, device: torch.device, collectives: Collectives
) -> Offload:
    """The homes that a config asks for; what cannot be had is refused when the config is read.

    Raises:
        ConfigError: there can be no files in the folder that it names.
    """
    link = link_for(device)
    weights = Place.DEVICE if config.offload_param.device == "none" else Place.HOST
    device_home = DeviceHome(precision, link, device, weights)
    asked = config.offload_optimizer
    home: Home = device_home
    if asked.device == "cpu":
        home = HostHome(precision, link, weights)
    elif asked.nvme_path is not None and asked.device == "nvme":
        folder, most = Path(asked.nvme_path), piece_numel(config)
        home = DiskHome(precision, link, weights, folder, asked.buffer_count, most)
    path = None
    if link.apart and weights is Place.HOST:
        path = HostPath(link, collectives, device)
    return Offload(link, path, device_home, home, asked.ratio)
