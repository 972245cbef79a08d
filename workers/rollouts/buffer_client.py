"""The client of a buffer of rollouts, and the trainer's view of the buffer: a log of samples.

Rule of ordering: `one-log` (docs/engine.md).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

from torch import Tensor

from rayzero.engine.data.consumed import Consumed
from rayzero.engine.data.sample_source import DatasetSource, MapDataset
from rayzero.engine.device import get_device
from rayzero.engine.errors import DataError, EngineError
from rayzero.engine.tensor_tree import map_tensors
from rayzero.workers.authenticated import MessageConnection
from rayzero.workers.rollouts.address import BufferAddress

POLL_S = 10.0
"""How long the buffer may hold a request that it cannot answer yet. Then the client repeats it."""
_CONNECT_S = 5.0
"""Limit for one attempt to connect. Attempts are repeated up to the client's limit."""
_RETRY_S = 0.1


class RolloutClient:
    """Calls a buffer. Reconnects if the buffer was restarted, also at another address. Used for one
    call at a time.

    Args:
        find: returns the current buffer's address; None: there is none, and calls wait.
        timeout_s: how long a reply may take beyond the call's `limit_s`; and how long a call is
            repeated while no buffer answers.
    """

    def __init__(self, find: Callable[[], BufferAddress | None], timeout_s: float) -> None:
        self._find = find
        self._timeout_s = timeout_s
        self._address: BufferAddress | None = None
        self._connection: MessageConnection | None = None

    def call(
        self,
        name: str,
        *arguments: Any,
        contents: Sequence[bytes] = (),
        limit_s: float = 0.0,
        check: Callable[[], None],
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Calls a method of the buffer. Returns the reply and its contents. A failed call is
        repeated, which is safe for all of the buffer's methods.

        Args:
            limit_s: how long the buffer may take.
            check: called while waiting; raises to end the call.

        Raises:
            DataError: the buffer refuses the call, or no buffer answers within `timeout_s`.
        """
        head = json.dumps([name, arguments]).encode()
        failed_s: float | None = None
        while True:
            check()
            address = self._find()
            if address is None:  # until the controller opens a buffer
                failed_s = None
                sleep(_RETRY_S)
                continue
            try:
                connection = self._connect(address)
                reply, *found = connection.request(head, *contents, limit_s=limit_s, check=check)
                break
            except (OSError, EOFError) as error:
                self.close()
                failed_s = monotonic() if failed_s is None else failed_s
                if monotonic() - failed_s > self._timeout_s:
                    raise DataError(
                        f"the buffer of rollouts ({self._address}) has not "
                        f"answered {name!r} for {self._timeout_s:g} s: {error}"
                    ) from error
                sleep(_RETRY_S)
            except BaseException:  # `check` has ended the call: the reply may still come
                self.close()
                raise
        values: dict[str, Any] = json.loads(reply)
        if "error" in values:
            raise DataError(*values["error"])
        return values, found

    def close(self) -> None:
        """Closes the connection; the next call opens another one. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, address: BufferAddress) -> MessageConnection:
        if self._connection is None or address != self._address:
            self.close()
            self._address = address
            limit_s = min(_CONNECT_S, self._timeout_s)
            self._connection = MessageConnection(
                address.host, address.port, address.secret, limit_s
            )
        return self._connection


class RolloutLog:
    """The log in the trainer's buffer, as a `SampleLog`. Also sends the buffer its prompts.

    All ranks of a generation read from one buffer, so that they train on the same samples. If that
    buffer is lost, the next generation reads from another one. Reads after `open` are from the
    buffer of the generation in which it was called.

    Args:
        prompts: a map-style dataset of values that can be pickled, the same on every rank.
        seed: the seed of the prompts' order.
        group: samples of each prompt.
        find: returns the number of this rank's generation, and the generation's buffer.
        timeout_s: as for `RolloutClient`.

    Raises:
        DataError: the dataset is not map-style, or empty.
    """

    def __init__(
        self,
        prompts: MapDataset,
        seed: int,
        group: int,
        find: Callable[[], tuple[int, BufferAddress | None]],
        timeout_s: float,
    ) -> None:
        self._prompts = DatasetSource(prompts, seed)
        self.length = self._prompts.length * group
        self.group = group
        self._find = find
        self._timeout_s = timeout_s
        self._client = RolloutClient(lambda: None, timeout_s)

    def open(self, consumed: Consumed, check: Callable[[], None]) -> None:
        generation, address = self._find()
        self._client.close()
        self._client = RolloutClient(lambda: address, self._timeout_s)
        extras = sorted(consumed.extras)
        self._client.call("open", generation, consumed.frontier, extras, check=check)

    def read(self, start: int, count: int, check: Callable[[], None]) -> list[tuple[int, Any]]:
        values, contents = self._ask("read", start, count, check=check)
        return list(zip(values["numbers"], map(decode, contents), strict=True))

    def consumed_at(self, position: int, check: Callable[[], None]) -> Consumed:
        values, _ = self._ask("consumed", position, check=check)
        return Consumed(values["frontier"], frozenset(values["extras"]))

    def _ask(
        self, call: str, *arguments: int, check: Callable[[], None]
    ) -> tuple[dict[str, Any], list[bytes]]:
        client = self._client
        while True:
            values, contents = client.call(call, *arguments, POLL_S, limit_s=POLL_S, check=check)
            numbers = values["wanted"]
            if numbers:
                prompts = [encode(*self._prompts.read_samples(number, 1)) for number in numbers]
                client.call("issue", numbers, contents=prompts, check=check)
            if values["ready"]:
                return values, contents


def encode(value: Any) -> bytes:
    """Pickles a prompt or a sample for other processes. Its tensors are copied to host memory; of a
    view, only the view's elements are copied. Raises EngineError if it cannot be pickled."""
    try:
        return pickle.dumps(map_tensors(value, _to_host), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise EngineError(
            f"a {type(value).__name__} cannot be sent to other processes: "
            f"{type(error).__name__}: {error}",
            allowed="what can be pickled: numbers, text, tensors, containers and dataclasses of "
            "them",
            fix="define its class at the level of a module that all workers import",
        ) from error


def decode(content: bytes) -> Any:
    """Returns the value that `encode` was called with. Unpickles, so the content must be from a
    process that has proved to belong to the job. Raises DataError if it cannot be unpickled."""
    try:
        return pickle.loads(content)
    except Exception as error:
        raise DataError(
            f"a rollout of another process cannot be read: {type(error).__name__}: {error}",
            fix="define its class at the level of a module that all workers import",
        ) from error


def _to_host(tensor: Tensor) -> Tensor:
    return get_device(tensor.device).to_host(tensor.detach()).clone()
