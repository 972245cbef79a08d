"""The entry point of the soak test's job. Only a worker imports it, while its process starts."""

from __future__ import annotations

from benchmarks.soak_control import SoakControl
from benchmarks.soak_job import train
from tests.support.nccl_like.settings import from_environment

__all__ = ["train"]

if from_environment() is not None:  # its import takes seconds
    from tests.support.nccl_like.install import install_from_environment

    install_from_environment()
SoakControl.from_environment().die_if_requested("importing")
