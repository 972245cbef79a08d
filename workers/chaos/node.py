"""Faults of a whole node, injected by a Ray process on the node: the vault."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

from rayzero.engine.errors import EngineError
from rayzero.workers.chaos.spec import FaultSpec

_CAP_NET_ADMIN = 12  # linux/capability.h
_COMMAND_TIMEOUT_S = 10.0
_GET_FLAGS = 0x8913  # SIOCGIFFLAGS
_UP = 0x1  # IFF_UP
_LOOPBACK = 0x8  # IFF_LOOPBACK


def network_id() -> str:
    """Returns an identifier of this process's network namespace: the machine's or a container's."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{machine}/{os.stat('/proc/self/ns/net').st_ino}"


def why_impossible(fault: FaultSpec, is_controller_node: bool, controller_network: str) -> str:
    """Returns why a fault cannot be injected into this process's node; empty if it can.

    Args:
        is_controller_node: whether the job's controller runs on this node.
        controller_network: the controller's `network_id`.
    """
    if fault.kind in ("kill_vault", "slow_node"):
        return ""
    if is_controller_node:
        return "the job's controller runs on that node, and would be lost with it"
    if fault.kind == "drop_node":
        name = _process_name(_raylet())
        return "" if name == "raylet" else f"the node's raylet is not known: found {name!r}"
    if network_id() == controller_network:
        return "that node shares its network with the job's controller"
    return _why_no_partition()


def inject_node_fault(fault: FaultSpec) -> None:
    """Injects the fault, after `why_impossible` was checked. Returns only for `partition`.

    Raises:
        EngineError: a system command failed.
    """
    match fault.kind:
        case "kill_vault":
            os.kill(os.getpid(), signal.SIGKILL)
        case "drop_node":
            _kill_node(_raylet())
        case "partition":
            _partition_network(fault.seconds)
        case _:
            raise EngineError(f"{fault} is not a fault of a node")


def _raylet() -> int:
    """Returns the raylet's pid, which Ray passes to its workers. The parent is used only without
    that: a worker's parent may also be the process that forked it."""
    return int(os.environ.get("RAY_RAYLET_PID", os.getppid()))


def _kill_node(raylet: int) -> None:
    """Kills the raylet first, so that it cannot deregister the node, and this process last."""
    children = _descendants(raylet)
    for pid in (raylet, *(pid for pid in children if pid != os.getpid()), os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _descendants(pid: int) -> list[int]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The state and the parent follow the name, which may contain any character.
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # it has exited
        children[int(parent)].append(int(folder.name))
    descendants, level = [], children[pid]
    while level:
        descendants += level
        level = [child for parent_pid in level for child in children[parent_pid]]
    return descendants


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "exited"


def _why_no_partition() -> str:
    if shutil.which("ip") is None:
        return "the command `ip` (iproute2) is not installed on that node"
    status = Path("/proc/self/status").read_text()
    held = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    if not int(held, 16) >> _CAP_NET_ADMIN & 1:
        return "Ray's processes on that node lack CAP_NET_ADMIN to change the network (run as root)"
    return "" if any(_active_interfaces()) else "that node has no network interface that is up"


def _active_interfaces() -> Iterator[str]:
    """Yields the names of the interfaces that are up, except for the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("16sH14x", name.encode(), 0)
            flags = struct.unpack("16xH14x", ioctl(any_socket, _GET_FLAGS, request))[0]
            if flags & _UP and not flags & _LOOPBACK:
                yield name


def _partition_network(seconds: float) -> None:
    """Takes the links down, and up again after `seconds`, with the routes that were lost.

    A detached process does that, because Ray may kill the vault during the partition, and the
    network must be restored.
    """
    names = [*_active_interfaces()]
    restore_routes = [
        ("ip", "route", "replace", *route) for name in names for route in _interface_routes(name)
    ]
    down = [("ip", "link", "set", name, "down") for name in names]
    up = [("ip", "link", "set", name, "up") for name in names]
    script = "\n".join(map(shlex.join, [*down, ("sleep", f"{seconds:g}"), *up, *restore_routes]))
    _run_command("sh", "-c", f"(\n{script}\n) >/dev/null 2>&1 </dev/null &")


def _interface_routes(name: str) -> list[list[str]]:
    """Returns an interface's routes, without those that the kernel adds by itself."""
    lines = _run_command("ip", "-4", "route", "show", "dev", name).splitlines()
    return [[*line.split(), "dev", name] for line in lines if "proto kernel" not in line]


def _run_command(*command: str) -> str:
    try:
        completed = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"the network could not be partitioned: {error}") from None
    return completed.stdout
