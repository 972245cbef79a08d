"""Free TCP ports."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

# Ray's workers use the ports below, and Linux the ports from 32768 for outgoing connections: such
# a port could be taken before the server binds it.
_FIRST, _LAST = 20_000, 32_000
_RANDOM = random.SystemRandom()  # unseeded: concurrent processes must draw different ports


def free_ports(count: int) -> list[int]:
    """Distinct free ports of 127.0.0.1 outside of the ephemeral range."""
    ports: list[int] = []
    with ExitStack() as sockets:
        while len(ports) < count:
            port = _RANDOM.randrange(_FIRST, _LAST)
            with suppress(OSError):
                sockets.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    return ports
