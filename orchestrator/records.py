"""Small records in a cluster's head: whoever reaches the head can read and write them."""

from __future__ import annotations

from typing import Any, Protocol

from ray._private import services  # finding heads on this machine is nowhere public
from ray._private.worker import global_worker
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError

from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.orchestrator.cluster import head_address, reach

_NAMESPACE = b"rayzero"
_LIMIT_S = 5.0


class HeadLostError(RayzeroError):
    """The cluster's head does not answer."""


class Records(Protocol):
    """Records by key. Every call may raise HeadLostError."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, value: bytes) -> None: ...

    def delete(self, key: str) -> None: ...

    def keys(self, prefix: str) -> list[str]: ...

    def drivers(self) -> frozenset[str]:
        """The ids of the Ray jobs whose driver is alive."""


class HeadRecords:
    """Records in Ray's own key-value store. They go with the head."""

    def __init__(self, client: GcsClient) -> None:
        self._client = client

    def get(self, key: str) -> bytes | None:
        value: bytes | None = self._call("internal_kv_get", key.encode(), _NAMESPACE)
        return value

    def put(self, key: str, value: bytes) -> None:
        self._call("internal_kv_put", key.encode(), value, True, _NAMESPACE)

    def delete(self, key: str) -> None:
        self._call("internal_kv_del", key.encode(), False, _NAMESPACE)

    def keys(self, prefix: str) -> list[str]:
        found: list[bytes] = self._call("internal_kv_keys", prefix.encode(), _NAMESPACE)
        return sorted(key.decode() for key in found)

    def drivers(self) -> frozenset[str]:
        jobs = self._call("get_all_job_info")
        return frozenset(job_id.hex() for job_id, job in jobs.items() if not job.is_dead)

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._client, method)(*args, timeout=_LIMIT_S)
        except RayError as error:
            raise HeadLostError(
                f"the head of the Ray cluster does not answer: {str(error).splitlines()[0]}"
            ) from None


def here() -> HeadRecords:
    """The records of the cluster that this process is connected to."""
    return HeadRecords(global_worker.gcs_client)  # type: ignore[attr-defined]


def at(address: str | None) -> list[HeadRecords]:
    """The records of the cluster at `address` or RAY_ADDRESS; without either, of every cluster
    whose head runs on this machine. This process does not join them.

    Raises:
        ConfigError: there is no such cluster.
    """
    named = head_address(address)
    searched = named in ("", "auto", "local")
    found = services.find_gcs_addresses() if searched else {named}  # type: ignore[no-untyped-call]
    addresses = sorted(found)
    for one in addresses:
        reach(one)
    if not addresses:
        raise ConfigError(
            "no Ray cluster runs on this machine",
            allowed="the machine that a job was started on, or the address of its cluster",
            fix="--address or RAY_ADDRESS: host:port of the cluster's head",
        )
    return [HeadRecords(GcsClient(address=one)) for one in addresses]
