"""The store where the members of a generation meet: a TCPStore that a stranger cannot poison.

torch's server has no authentication: any client that reaches its port can list, read, change and
delete keys. So it listens on the node's own address only, and its clients use it by way of
`AuthenticatedStore`, with a secret that the controller sends with each assignment.

Rule of ordering: `stale-generation` (docs/engine.md).
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from rayzero.engine.errors import ConfigError
from rayzero.engine.torch_private import Store, TCPStore

UNCHECKED_WAIT_S = 5.0
"""How long a wait trusts the server to notify it; then it polls, and looks for deleted keys."""
_POLL_INTERVAL_S = 0.2
_TAG_BYTES = 32


class ForgedKeyError(dist.DistError):
    """A stranger has changed or deleted a key. Counts as a failed collective: the generation is
    begun again, with another store and another secret."""


def open_store(address: str, timeout_s: float) -> TCPStore:
    """Serves a store on a free port of this node's address, while the returned object lives.

    Raises:
        ConfigError: no interface of this node has that address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError as error:
        raise ConfigError(
            f"the rendezvous store cannot listen on {address}, Ray's address of this node: {error}",
            allowed="an address of one of the node's interfaces",
            fix="--node-ip-address of `ray start` on that node",
        ) from None
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


class AuthenticatedStore(Store):
    """Authenticates the values of keys. A changed value, or one of another key, is an error, and so
    is the deletion of a key set here. Names and values can be read by strangers.

    Used by torch's C++ from any thread. Counters (`add`) have no authenticated value: nothing but a
    barrier uses them.

    Args:
        store: a client's; all of its users have the same `secret`.
        on_value: called with each value that is set or read, by the same thread.
    """

    def __init__(
        self, store: Store, secret: bytes, on_value: Callable[[bytes], None] = lambda value: None
    ) -> None:
        super().__init__()
        self._store: Any = store  # torch's type stubs are incomplete
        self._secret = secret
        self._on_value = on_value
        self._own_keys: set[str] = set()
        self._present: set[str] = set()  # `get` follows `wait`: a round trip less
        self._clones: list[AuthenticatedStore] = []  # C++ does not keep their Python objects

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._on_value(data)
        self._store.set(key, self._tag(key, data) + data)
        self._own_keys.add(key)

    def get(self, key: str) -> bytes:
        if key not in self._present:
            self.wait([key])
        # Unlike torch's `get`, this does not wait for a key that a stranger has deleted meanwhile.
        content = self._store.compare_set(key, "absent", "absent")
        tag, value = content[:_TAG_BYTES], content[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(key, value)):
            raise ForgedKeyError(
                f"the rendezvous store's {key!r} was changed or deleted by a stranger"
            )
        self._on_value(value)
        return bytes(value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = timeout or self._store.timeout
        until_s = monotonic() + limit.total_seconds()
        try:
            self._store.wait(keys, min(limit, timedelta(seconds=UNCHECKED_WAIT_S)))
        except dist.DistStoreError:
            if limit.total_seconds() <= UNCHECKED_WAIT_S:
                raise
            while not self.check(keys):
                self._check_own_keys()
                if monotonic() > until_s:
                    missing = [key for key in keys if not self.check([key])]
                    text = f"no member has set {missing} within {limit.total_seconds():g} s"
                    raise dist.DistStoreError(text) from None
                sleep(_POLL_INTERVAL_S)
        self._present.update(keys)

    def _check_own_keys(self) -> None:
        for key in list(self._own_keys):
            if not self.check([key]):
                raise ForgedKeyError(
                    f"the rendezvous store's key {key!r} was deleted by a stranger"
                )

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(keys))

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def delete_key(self, key: str) -> bool:
        self._own_keys.discard(key)
        self._present.discard(key)
        return bool(self._store.delete_key(key))

    def clone(self) -> AuthenticatedStore:
        """A store with a connection of its own."""
        clone = AuthenticatedStore(self._store.clone(), self._secret, self._on_value)
        self._clones.append(clone)
        return clone

    def _tag(self, key: str, value: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._secret, len(name).to_bytes(4) + name + value, "sha256")
