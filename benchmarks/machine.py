"""The facts about a machine that a number means nothing without."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import version
from typing import Any


def facts() -> dict[str, Any]:
    """Of this machine now. `load`: the mean number of processes that wanted a core, last minute."""
    return {
        "date": date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "ray": version("ray"),
        "load": round(os.getloadavg()[0], 1),
    }


def told(found: dict[str, Any]) -> str:
    """The facts as one line."""
    return (
        f"{found['date']}: {found['cores']} cores (load {found['load']}), {found['machine']}, "
        f"torch {found['torch']}, Ray {found['ray']}, Python {found['python']}"
    )
