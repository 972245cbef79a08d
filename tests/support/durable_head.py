"""A Ray cluster of one node and a head with a store (RocksDB), which can be lost and come back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

from rayzero.orchestrator.cluster.local_cluster import ForkServer, kill_trees
from rayzero.workers.fork_server import ADDRESS_VARIABLE
from tests.support.ports import free_ports
from tests.support.token_head import OBJECT_STORE_BYTES, ROOT, START_TIMEOUT_S, wait_for

_MARK = "RAYZERO_DURABLE_HEAD"
_RAY = str(Path(sys.executable).parent / "ray")
_STARTED = "Ray runtime started"
_BIND = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'


class DurableHead:
    """Owns the cluster's processes and its folder in /tmp, until `close`. The head has no CPUs, so
    workers run on the node.

    Args:
        folder: for logs.
    """

    def __init__(self, folder: Path, cpus: int) -> None:
        self._folder = folder
        self._session = Path(tempfile.mkdtemp(prefix="rz-", dir="/tmp"))
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.env = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            _MARK: str(folder),
        }
        self._fork_server = ForkServer(self.env)
        self.env[ADDRESS_VARIABLE] = self._fork_server.address
        self._node: subprocess.Popen[bytes] | None = None
        self._head: subprocess.Popen[bytes] | None = None
        self.start_head()
        words = (f"--address={self.address}", "--node-ip-address=127.0.0.2", f"--num-cpus={cpus}")
        self._node = self._start("node", words, RAY_gcs_rpc_server_reconnect_timeout_s="600")

    def start_head(self, as_other_machine: bool = False) -> None:
        """Also the lost one, which finds what the cluster was in its store.

        Args:
            as_other_machine: its processes see another boot id, and cannot know whether those of
                the lost one live. Needs root and `unshare`.
        """
        (self._session / "ray_current_cluster").unlink(missing_ok=True)  # `ray start` refuses
        port = self.address.rpartition(":")[2]
        words = (
            *("--head", "--no-monitor", "--include-log-monitor=false", "--num-cpus=0"),
            *("--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--port={port}"),
            f"--temp-dir={self._session}",
        )
        store = {"storage": "rocksdb", "storage_path": str(self._session / "store")}
        settings = {f"RAY_gcs_{name}": value for name, value in store.items()}
        other: tuple[str, ...] = ()
        if as_other_machine:
            boot_id = self._session / "boot_id"
            boot_id.write_text(f"{uuid.uuid4()}\n")
            other = (
                "unshare",
                "--mount",
                "--propagation",
                "slave",
                "sh",
                "-c",
                _BIND,
                str(boot_id),
            )
        self._head = self._start("head", words, prefix=other, **settings)

    def lose_head(self, but: int | None = None) -> None:
        """SIGKILL to all of the head's processes, one excepted."""
        assert self._head is not None
        children = psutil.Process(self._head.pid).children(recursive=True)
        for pid in (self._head.pid, *(child.pid for child in children)):
            with suppress(ProcessLookupError):
                if pid != but:
                    os.kill(pid, signal.SIGKILL)
        self._head.wait(20)

    def processes(self, *titles: str) -> set[int]:
        """The cluster's processes whose titles begin so, as the system sees them."""
        found = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_own = process.environ().get(_MARK) == str(self._folder)
                if is_own and " ".join(process.cmdline()).startswith(titles):
                    found.add(process.pid)
        return found

    def close(self) -> None:
        kill_trees(process.pid for process in (self._head, self._node) if process is not None)
        for process in (self._head, self._node):
            if process is not None:
                process.wait(20)
        self._fork_server.stop()
        shutil.rmtree(self._session, ignore_errors=True)

    def _start(
        self, name: str, words: tuple[str, ...], prefix: tuple[str, ...] = (), **env: str
    ) -> subprocess.Popen[bytes]:
        path = self._folder / f"{name}.log"
        path.write_bytes(b"")
        store = f"--object-store-memory={OBJECT_STORE_BYTES}"
        command = [*prefix, _RAY, "start", "--block", "--disable-usage-stats", store, *words]
        with path.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**self.env, **env})

        def has_started() -> bool:
            assert process.poll() is None, path.read_text()
            return _STARTED in path.read_text()

        wait_for(has_started, START_TIMEOUT_S, name)
        return process
