"""What a worker may ask of its vault, one function a request."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from rayzero.engine.errors import DataError
from rayzero.workers.messages import SlotRef
from rayzero.workers.vault.header import Geometry
from rayzero.workers.vault.images import CHUNK_BYTES, Fetch
from rayzero.workers.vault.peers import Peer
from rayzero.workers.vault.shelf import Shelf
from rayzero.workers.vault.slots import write_all
from rayzero.workers.vault.wire import encode_error

Request: TypeAlias = dict[str, Any]
Reply: TypeAlias = tuple[dict[str, Any], list[int]]
"""What an answer says, and descriptors to send along and close."""


class Requests:
    """Answers requests. Safe to use from any thread, if a peer's own come one after another."""

    def __init__(self, node_id: str, shelf: Shelf, fetch: Fetch) -> None:
        self._node_id = node_id
        self._shelf = shelf
        self._fetch = fetch
        self._operations: Mapping[str, Callable[[Peer, Request], Reply]] = {
            "hello": self._hello,
            "reserve": self._reserve,
            "open": self._open,
            "fetch": self._read_elsewhere,
            "complete": self._complete,
            "goodbye": self._goodbye,
        }

    def is_slow(self, request: Request) -> bool:
        """Whether the answer takes long enough to keep others waiting."""
        return request.get("op") in ("reserve", "fetch")

    def answer(self, peer: Peer, request: Request) -> Reply:
        """Does what is asked; what goes wrong is in the answer."""
        try:
            operation = self._operations.get(request.get("op", ""))
            if operation is None:
                raise DataError(f"a vault knows no request {request.get('op')!r}")
            return operation(peer, request)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the worker's to hear
            return {"error": encode_error(error)}, []

    def _hello(self, peer: Peer, request: Request) -> Reply:
        peer.worker, peer.pid = int(request["worker"]), int(request["pid"])
        return {"node_id": self._node_id}, []

    def _goodbye(self, peer: Peer, request: Request) -> Reply:
        peer.worker = -1
        self._shelf.abandon(peer.number)
        return {}, []

    def _reserve(self, peer: Peer, request: Request) -> Reply:
        fds = self._shelf.reserve(
            peer.number,
            int(request["generation"]),
            int(request["rank"]),
            int(request["world_size"]),
            Geometry(*map(int, request["geometry"])),
            int(request["buffers"]),
        )
        if peer.closed:  # it died while the memory was made: nobody else would let go of it
            self._shelf.abandon(peer.number)
        return {}, fds

    def _open(self, peer: Peer, request: Request) -> Reply:
        return {}, [self._shelf.open(_ref(request, self._node_id))]

    def _read_elsewhere(self, peer: Peer, request: Request) -> Reply:
        length = min(int(request["length"]), CHUNK_BYTES)
        found = self._fetch(_ref(request, str(request["node_id"])), int(request["offset"]), length)
        fd = os.memfd_create("rayzero-fetched", os.MFD_CLOEXEC)
        try:
            write_all(fd, found, 0)
        except BaseException:
            os.close(fd)
            raise
        return {"length": len(found)}, [fd]

    def _complete(self, peer: Peer, request: Request) -> Reply:
        self._shelf.complete(int(request["generation"]))
        return {}, []


def _ref(request: Request, node_id: str) -> SlotRef:
    return SlotRef(int(request["generation"]), int(request["rank"]), int(request["step"]), node_id)
