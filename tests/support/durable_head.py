"""A Ray cluster of nodes and a head with a store, which can be lost and come back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

from rayzero.orchestrator.cluster.local_cluster import ForkServer, kill_trees
from rayzero.orchestrator.cluster.ray_api import CONTROLLER_RESOURCE
from rayzero.workers.fork_server import ADDRESS_VARIABLE
from tests.support.forking import ray_start
from tests.support.ports import free_ports
from tests.support.token_head import OBJECT_STORE_BYTES, ROOT, START_TIMEOUT_S, wait_for

_MARK = "RAYZERO_DURABLE_HEAD"
_STARTED = "Ray runtime started"
START_ATTEMPTS = 4
"""Ray gives its own processes 30 s to start, which they may miss on a busy machine."""
_UNSHARE = "unshare", "--mount", "--propagation", "slave"
_BIND = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'


class DurableHead:
    """Owns the cluster's processes and its folder in /tmp, until `close`. The head has no CPUs, so
    workers run on the nodes, where they are forked; those of the head end with it, and are not.

    Args:
        folder: for logs.
        cpus: of each node.
        store: "rocksdb", or "redis", whose server outlives the head; its program must be on PATH.
        has_controller_node: whether another node, without CPUs, is there for the job's process.
    """

    def __init__(
        self,
        folder: Path,
        cpus: int,
        nodes: int = 1,
        store: str = "rocksdb",
        has_controller_node: bool = False,
    ) -> None:
        self.has_controller_node = False
        self._num_nodes = 0
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
        self._head: subprocess.Popen[bytes] | None = None
        self._others: list[subprocess.Popen[bytes]] = []
        path = str(self._session / "store")
        self._store = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": path}
        if store == "redis":
            self._store = {"RAY_REDIS_ADDRESS": self._start_redis()}
        self.start_head()
        for _ in range(nodes):
            self._start_node(f"--num-cpus={cpus}")
        if has_controller_node:
            self.start_controller_node()

    def start_controller_node(self) -> None:
        """Where the processes of jobs that are submitted from now on run."""
        self.has_controller_node = True
        offer = json.dumps({CONTROLLER_RESOURCE: 1})
        self._start_node("--num-cpus=0", f"--resources={offer}")

    def _start_node(self, *words: str) -> None:
        number = self._num_nodes
        self._num_nodes += 1
        ip, log = f"--node-ip-address=127.0.0.{2 + number}", "--include-log-monitor=false"
        env = {
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
            ADDRESS_VARIABLE: self._fork_server.address,
        }
        all_words = (f"--address={self.address}", ip, log, *words)
        node = self._start(f"node-{number}", all_words, ray_start(forks=True), **env)
        self._others.append(node)

    def start_head(self, as_other_machine: bool = False) -> None:
        """Also the lost one, which finds what the cluster was in its store.

        Args:
            as_other_machine: its processes see another boot id, and cannot know whether those of
                the lost one live. Needs root and `unshare`.
        """
        port = self.address.rpartition(":")[2]
        words = (
            *("--head", "--no-monitor", "--include-log-monitor=false", "--num-cpus=0"),
            *("--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--port={port}"),
            f"--temp-dir={self._session}",
        )
        other: tuple[str, ...] = ()
        if as_other_machine:
            boot_id = self._session / "boot_id"
            boot_id.write_text(f"{uuid.uuid4()}\n")
            other = (*_UNSHARE, "sh", "-c", _BIND, str(boot_id))
        self._head = self._start("head", words, (*other, *ray_start(forks=False)), **self._store)

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
        processes = [*([] if self._head is None else [self._head]), *self._others]
        kill_trees(process.pid for process in processes)
        for process in processes:
            process.wait(20)
        self._fork_server.stop()
        shutil.rmtree(self._session, ignore_errors=True)

    def _start_redis(self) -> str:
        """Returns its address."""
        port = free_ports(1)[0]
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
        self._others.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        return f"127.0.0.1:{port}"

    def _start(
        self, name: str, words: tuple[str, ...], ray: tuple[str, ...], **env: str
    ) -> subprocess.Popen[bytes]:
        path = self._folder / f"{name}.log"
        store = f"--object-store-memory={OBJECT_STORE_BYTES}"
        command = [*ray, "--block", "--disable-usage-stats", store, *words]

        def has_answered() -> bool:
            return process.poll() is not None or _STARTED in path.read_text()

        for _ in range(START_ATTEMPTS):
            # It refuses another head where there was one.
            (self._session / "ray_current_cluster").unlink(missing_ok=True)
            with path.open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, env={**self.env, **env})
            wait_for(has_answered, START_TIMEOUT_S, name)
            if process.poll() is None:
                return process
            if "timed out during startup" not in path.read_text():
                break
        raise RuntimeError(path.read_text())
