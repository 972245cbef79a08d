"""Description of the machine that a measurement was made on."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import version
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Hardware, versions and `load`, the load average of the last minute."""
    return {
        "date": date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "ray": version("ray"),
        "load": round(os.getloadavg()[0], 1),
    }


def format_machine(machine: dict[str, Any]) -> str:
    """One line of text."""
    return (
        f"{machine['date']}: {machine['cores']} cores (load {machine['load']}), "
        f"{machine['machine']}, torch {machine['torch']}, "
        f"Ray {machine['ray']}, Python {machine['python']}"
    )
