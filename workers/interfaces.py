"""Which network interface has an address."""

from __future__ import annotations

import socket
import struct
from fcntl import ioctl

_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def interface_of(ip: str) -> str | None:
    """The name of the interface with that IPv4 address; None when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = ioctl(any_socket, _GET_ADDRESS, request)[20:24]
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(found) == ip:
                return name
    return None
