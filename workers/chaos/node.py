"""Faults of a whole node, acted out from inside by a process of Ray's on it: its vault."""

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

_CAP_NET_ADMIN = 12  # the capability's number


_COMMAND_TIMEOUT_S = 10.0


_GET_FLAGS, _UP, _LOOPBACK = 0x8913, 0x1, 0x8  # SIOCGIFFLAGS, IFF_UP, IFF_LOOPBACK


def network_id() -> str:
    """Names the network that this process is in: the machine's, or a container's of its own."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{machine}/{os.stat('/proc/self/ns/net').st_ino}"


def why_impossible(fault: FaultSpec, is_here: bool, controller_network: str) -> str:
    """Why a fault cannot happen to this process's node; empty when it can.

    Args:
        is_here: whether the job's controller is on this node.
        controller_network: the controller's `network()`.
    """
    if fault.kind == "kill_vault":
        return ""
    if is_here:
        return "the job's controller runs on that node, and would go with it"
    if fault.kind == "drop_node":
        name = _process_name(os.getppid())
        return "" if name == "raylet" else f"the vault's parent is {name!r}, not the node's raylet"
    if network_id() == controller_network:
        return "that node has its network in common with the job's controller"
    return _why_no_partition()


def inject_node_fault(fault: FaultSpec) -> None:
    """Makes it happen. Only `partition` comes back. Ask for an `obstacle` before.

    Raises:
        EngineError: a command failed.
    """
    match fault.kind:
        case "kill_vault":
            os.kill(os.getpid(), signal.SIGKILL)
        case "drop_node":
            _kill_node(os.getppid())
        case "partition":
            _partition_network(fault.seconds)
        case _:
            raise EngineError(f"{fault} is no fault of a node")


def _kill_node(raylet: int) -> None:
    """The raylet first, so that it cannot take leave for the others, and this process last."""
    below = _descendants(raylet)
    for pid in (raylet, *(pid for pid in below if pid != os.getpid()), os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _descendants(pid: int) -> list[int]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which may hold anything, come the state and the parent.
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # it is gone
        children[int(parent)].append(int(folder.name))
    found, new = [], children[pid]
    while new:
        found += new
        new = [child for one in new for child in children[one]]
    return found


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"


def _why_no_partition() -> str:
    if shutil.which("ip") is None:
        return "there is no command `ip` (iproute2) on that node"
    status = Path("/proc/self/status").read_text()
    held = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    if not int(held, 16) >> _CAP_NET_ADMIN & 1:
        return "Ray's processes on that node may not change the network (root, or CAP_NET_ADMIN)"
    return "" if any(_active_interfaces()) else "that node has no network to cut"


def _active_interfaces() -> Iterator[str]:
    """Those of this network that are up, but for the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("16sH14x", name.encode(), 0)
            flags = struct.unpack("16xH14x", ioctl(any_socket, _GET_FLAGS, request))[0]
            if flags & _UP and not flags & _LOOPBACK:
                yield name


def _partition_network(seconds: float) -> None:
    """Takes the links down and brings them up again, with the routes that went with them.

    By a process of its own, without a parent: Ray may end the vault meanwhile, and the network
    must come back. It lives for as long as the cut.
    """
    names = [*_active_interfaces()]
    back = [
        ("ip", "route", "replace", *route) for name in names for route in _interface_routes(name)
    ]
    down, up = ([("ip", "link", "set", name, to) for name in names] for to in ("down", "up"))
    script = "\n".join(map(shlex.join, [*down, ("sleep", f"{seconds:g}"), *up, *back]))
    _run_command("sh", "-c", f"(\n{script}\n) >/dev/null 2>&1 </dev/null &")


def _interface_routes(name: str) -> list[list[str]]:
    """Those over an interface that the kernel does not make by itself."""
    lines = _run_command("ip", "-4", "route", "show", "dev", name).splitlines()
    return [[*line.split(), "dev", name] for line in lines if "proto kernel" not in line]


def _run_command(*command: str) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"the network could not be cut: {error}") from None
    return done.stdout
