"""Ports for servers that are to be started."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

# Ray's workers listen below, and Linux takes the ports of outgoing connections from 32768 up: one
# that was free a moment ago may be one of those by the time the server binds it.
_FIRST, _LAST = 20_000, 32_000
_CHANCE = random.SystemRandom()  # not the seeded one: processes beside this one ask, too


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nobody has, and that nobody is given by chance."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            port = _CHANCE.randrange(_FIRST, _LAST)
            with suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found
