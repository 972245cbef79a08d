"""A stranger at a job's rendezvous store: finds its port, guesses at the secret, and floods it."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

ATTEMPT_S = 0.5
"""Limit for an answer; a store on this machine answers within milliseconds."""
SEARCH_INTERVAL_S = 0.005
"""A generation forms within 0.1 s."""
CONNECTIONS = 100
"""Kept open to each store, half of them with an unfinished message."""
PROOF_BYTES = 32
_LISTEN = "0A"

Address = tuple[str, int]


@dataclass
class AttackReport:
    """Stores that were found, guesses that they refused, and connections kept open to them."""

    stores: set[Address] = field(default_factory=set)
    refused: int = 0
    connections: int = 0

    @property
    def fired(self) -> bool:
        """Whether a store was there to be attacked."""
        return bool(self.stores) and self.refused + self.connections > 0

    def __str__(self) -> str:
        return (
            f"{len(self.stores)} stores, {self.refused} guesses refused, "
            f"{self.connections} connections"
        )


def attack_stores(
    find_pids: Callable[[], Iterable[int]], seconds: float, seed: int
) -> AttackReport:
    """Attacks each store that a process of `find_pids` serves within the next `seconds`."""
    rng, report = random.Random(seed), AttackReport()
    seen: set[Address] = set()
    until_s = time.monotonic() + seconds
    with ExitStack() as stack:
        while time.monotonic() < until_s:
            for address, inode in listening_sockets().items():
                if address not in seen and any(owns(pid, inode) for pid in find_pids()):
                    seen.add(address)
                    if is_store(address):
                        report.stores.add(address)
                        _flood(address, rng, report, stack)
            for address in report.stores:
                _guess(address, rng, report)
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
    """Whether a server begins as a rendezvous store does: with a random number, unasked."""
    with suppress(OSError), socket.create_connection(address, ATTEMPT_S) as connection:
        return len(connection.recv(PROOF_BYTES + 1)) == PROOF_BYTES
    return False


def _guess(address: Address, rng: random.Random, report: AttackReport) -> None:
    """A proof without the secret, and a request. An answer is an error of the store's."""
    with suppress(OSError), socket.create_connection(address, ATTEMPT_S) as connection:
        connection.sendall(rng.randbytes(2 * PROOF_BYTES) + _set_request())
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
        if len(answer) > PROOF_BYTES:
            raise AssertionError(f"a stranger got {answer!r} from the store at {address}")
        report.refused += 1


def _set_request() -> bytes:
    fields = b"".join(struct.pack(">Q", len(text)) + text for text in (b"set", b"key", b"forged"))
    return struct.pack(">Q", len(fields)) + fields


def _flood(address: Address, rng: random.Random, report: AttackReport, stack: ExitStack) -> None:
    """Junk, and messages that announce more than they bring; the connections stay open."""
    for number in range(CONNECTIONS):
        with suppress(OSError):
            connection = socket.create_connection(address, ATTEMPT_S)
            stack.enter_context(connection)
            report.connections += 1
            half = struct.pack(">Q", 1 << rng.randrange(63))
            connection.sendall(half if number % 2 else rng.randbytes(rng.randrange(1, 200)))
