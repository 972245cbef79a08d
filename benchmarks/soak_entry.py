"""The entry point of the soak test's job. Only a worker imports it, while its process starts."""

from __future__ import annotations

from benchmarks.soak_control import SoakControl
from benchmarks.soak_job import train

__all__ = ["train"]

SoakControl.from_environment().die_if_requested("importing")
