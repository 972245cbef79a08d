"""Kinds of memory."""

from __future__ import annotations

from enum import Enum


class Place(Enum):
    """Where a tensor rests."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
