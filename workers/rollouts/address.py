"""The address of a buffer of rollouts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BufferAddress:
    """The address on which a buffer of rollouts listens, and the secret that its clients must know.

    Args:
        node_id: the buffer's node.
        vault: the address of the vault that contains the buffer.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    node_id: str = ""
    vault: str = ""
