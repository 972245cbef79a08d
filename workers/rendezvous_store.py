"""The store where the members of a generation meet: a TCPStore that a stranger cannot poison.

torch's server has no authentication: any client that reaches its port can list, read, change and
delete keys. So it listens on the node's own address only, and its clients use it by way of
`AuthenticatedStore`, with a secret that the controller sends with each assignment.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import shake_256
from secrets import token_bytes
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from rayzero.engine.errors import ConfigError

UNCHECKED_WAIT_S = 5.0
"""How long a wait trusts the server to notify it; then it polls, and looks for deleted keys."""
_POLL_INTERVAL_S = 0.2
_NONCE_BYTES, _TAG_BYTES = 16, 32


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
    """Hides the names of keys, and encrypts and authenticates their values. A changed value, or one
    of another key, is an error, and so is the deletion of a key set here.

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
        self._own_keys: dict[str, str] = {}
        self._present: set[str] = set()  # `get` follows `wait`: a round trip less
        self._clones: list[AuthenticatedStore] = []  # C++ does not keep their Python objects

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._on_value(data)
        sealed = token_bytes(_NONCE_BYTES)
        sealed += self._mask(key, sealed, data)
        self._store.set(self._name(key), self._digest("value", key, sealed) + sealed)
        self._own_keys[self._name(key)] = key

    def get(self, key: str) -> bytes:
        if key not in self._present:
            self._wait([key], self._store.timeout)
        # Unlike torch's `get`, this does not wait for a key that a stranger has deleted meanwhile.
        content = self._store.compare_set(self._name(key), "absent", "absent")
        tag, sealed = content[:_TAG_BYTES], content[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._digest("value", key, sealed)):
            raise ForgedKeyError(
                f"the rendezvous store's {key!r} was changed or deleted by a stranger"
            )
        value = self._mask(key, sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:])
        self._on_value(value)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, timeout or self._store.timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check([self._name(key) for key in keys]))

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(self._name(key), value))

    def delete_key(self, key: str) -> bool:
        self._own_keys.pop(self._name(key), None)
        self._present.discard(key)
        return bool(self._store.delete_key(self._name(key)))

    def clone(self) -> AuthenticatedStore:
        """A store with a connection of its own."""
        clone = AuthenticatedStore(self._store.clone(), self._secret, self._on_value)
        self._clones.append(clone)
        return clone

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        names, until_s = [self._name(key) for key in keys], monotonic() + timeout.total_seconds()
        try:
            self._store.wait(names, min(timeout, timedelta(seconds=UNCHECKED_WAIT_S)))
            self._present.update(keys)
            return
        except dist.DistStoreError:
            if timeout.total_seconds() <= UNCHECKED_WAIT_S:
                raise
        while not self._store.check(names):
            for name, key in list(self._own_keys.items()):
                if not self._store.check([name]):
                    raise ForgedKeyError(
                        f"the rendezvous store's key {key!r} was deleted by a stranger"
                    )
            if monotonic() > until_s:
                missing = [key for key in keys if not self.check([key])]
                seconds = timeout.total_seconds()
                raise dist.DistStoreError(f"no member has set {missing} within {seconds:g} s")
            sleep(_POLL_INTERVAL_S)

    def _name(self, key: str) -> str:
        return self._digest("name", key).hex()

    def _digest(self, purpose: str, key: str, content: bytes = b"") -> bytes:
        text = f"{purpose} {len(key)} {key}".encode()
        return hmac.digest(self._secret, text + content, "sha256")

    def _mask(self, key: str, nonce: bytes, data: bytes) -> bytes:
        """Encrypts or decrypts: a nonce is used once."""
        stream = shake_256(self._digest("mask", key, nonce)).digest(len(data))
        return (int.from_bytes(data) ^ int.from_bytes(stream)).to_bytes(len(data))
