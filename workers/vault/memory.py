"""How much memory this machine, or this container, can still give."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rayzero.engine.errors import RayzeroError


def available_bytes(root: Path = Path("/")) -> int:
    """The least of what the kernel calls available and what each control group leaves.

    Shared memory counts like any other: it cannot be swapped out under most limits.

    Args:
        root: where /proc and /sys are, for tests.
    """
    return min([_mem_available(root), *_left_in_groups(root)])


def has_room(processes: int, root: Path = Path("/")) -> bool:
    """Whether so many processes like this one could each take as much memory again, and half of
    that besides. False where nobody can tell."""
    try:
        pages = int((root / "proc/self/statm").read_text().split()[1])
        return available_bytes(root) > 1.5 * processes * pages * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, RayzeroError):
        return False


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RayzeroError("/proc/meminfo has no MemAvailable line", "a Linux kernel since 3.14")


def _left_in_groups(root: Path) -> Iterator[int]:
    """What our control group and each one above it leaves: the tightest limit holds."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, idle = "sys/fs/cgroup", "memory.max", "memory.current", "inactive"
        elif "memory" in controllers.split(","):
            base, limit, usage, idle = (
                "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive",
            )
        else:
            continue
        for group in _upwards(root / base, path):
            most = _number(group / limit)
            if most is not None:
                # File pages that nobody uses go when memory is asked for.
                used = (_number(group / usage) or 0) - _statistic(group, f"{idle}_file")
                yield max(0, most - used)


def _upwards(base: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it. In a container the path may be the host's name for
    what is mounted as `base`; then only `base` is there."""
    group = base / path.strip("/")
    while group != base and base in group.parents:
        yield group
        group = group.parent
    yield base


def _number(path: Path) -> int | None:
    """None when there is no such file, or no limit in it."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(group: Path, name: str) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
