"""The fork server and the end of a local cluster's processes; one test starts Ray."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from rayzero.orchestrator.cluster.local_cluster import ForkServer, kill_trees
from rayzero.workers.fork_server import ADDRESS_VARIABLE, SETUP_SCRIPT

RAY = Path(str(find_spec("ray").origin)).parent  # type: ignore[union-attr]
WORKER = """
import json, os, sys, time
before = sorted({"torch", "ray"} & set(sys.modules))
import numpy, torch
print(json.dumps([before, sys.argv, os.environ["GREETING"], os.getcwd(), float(numpy.random.rand()),
                  torch.ones(2).sum().item(), os.getpid() == os.getpgid(0), sys.path[0]]))
"""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer({"OMP_NUM_THREADS": "1"})
    yield server
    server.stop()
    assert server.pids() == []


def start_worker(address: str, folder: Path, **context: object) -> subprocess.Popen[str]:
    """As Ray does: by the script that prepares a worker's environment.

    Args:
        context: of the runtime environment, if it has one.
    """
    words = [str(folder / "worker.py"), "--id", "a b"]
    if context:
        unused = {"command_prefix": [], "override_worker_entrypoint": None, "java_jars": []}
        given = unused | {"env_vars": {}, "py_executable": sys.executable} | context
        words += ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(given)}"]
    return subprocess.Popen(
        [sys.executable, SETUP_SCRIPT, *words],
        cwd=folder,
        env={**os.environ, "GREETING": "hi", ADDRESS_VARIABLE: address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_forked_worker_has_what_ray_gave_the_client(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    variables = {"env_vars": {"GREETING": "hello"}}
    workers = [start_worker(server.address, tmp_path, **it) for it in ({}, variables)]
    outputs = [worker.communicate(timeout=60) for worker in workers]
    assert [err for _, err in outputs] == ["", ""]
    seen = [json.loads(out) for out, _ in outputs]
    argv = [str(tmp_path / "worker.py"), "--id", "a b"]
    draws = {values.pop(4) for values in seen}
    assert len(draws) == 2, "numpy draws other numbers in each"
    imported = ["torch"]
    assert seen == [
        [imported, argv, greeting, str(tmp_path), 2.0, True, str(tmp_path)]
        for greeting in ("hi", "hello")
    ]


@pytest.mark.parametrize(
    "context",
    [
        {"env_vars": {"LD_LIBRARY_PATH": "/a"}},
        {"env_vars": {"PYTHONPATH": "${PYTHONPATH}:/a"}},
        {"command_prefix": ["export", "GREETING=hi", "&&"]},
        {"py_executable": f"{sys.executable} -X utf8"},
    ],
    ids=str,
)
def test_worker_with_another_environment_is_started_by_ray(
    tmp_path: Path, context: dict[str, object]
) -> None:
    """The fork server is not asked: there is none."""
    (tmp_path / "worker.py").write_text("import sys; print(sys.argv[1:], 'torch' in sys.modules)")
    shutil.copy(RAY / "_private/workers/setup_worker.py", tmp_path)
    out, err = start_worker("rayzero-no-such-server", tmp_path, **context).communicate(timeout=60)
    assert (out, err) == ("['--id', 'a b'] False\n", "")


def test_imports_of_the_fork_server_ask_no_device() -> None:
    """A GPU that the parent has asked cannot be used by what it forks."""
    code = (
        "import torch\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = None\n"
        "torch.accelerator.is_available = torch.accelerator.current_accelerator = None\n"
        "import rayzero.workers.worker"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_worker_starts_without_its_fork_server(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import sys; print(sys.argv[1:])")
    worker = start_worker("rayzero-no-such-server", tmp_path)
    out, err = worker.communicate(timeout=60)
    assert (worker.returncode, out) == (0, "['--id', 'a b']\n")
    assert "the fork server is not used: " in err


def test_fork_server_ends_with_the_process_that_started_it() -> None:
    code = "from rayzero.orchestrator.cluster.local_cluster import *; print(*ForkServer({}).pids())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    process, deadline_s = int(done.stdout), time.monotonic() + 30
    while psutil.pid_exists(process) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not psutil.pid_exists(process)


def test_kill_trees_ends_orphans_of_what_it_kills() -> None:
    tree = subprocess.Popen(
        ["sh", "-c", "sh -c 'sleep 100 & echo $! $$; sleep 100' & wait"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tree.stdout is not None
    pids = [tree.pid, *map(int, tree.stdout.readline().split())]
    kill_trees([tree.pid])
    tree.wait(10)
    deadline_s = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


CLUSTER = """
import psutil, ray, sys
from rayzero.orchestrator.cluster.connect import connect
cluster = connect("local")
processes = psutil.Process().children(recursive=True)
sockets = [socket for process in processes for socket in process.net_connections("tcp")]
hosts = {socket.laddr.ip for socket in sockets if socket.status == "LISTEN"}
print(len(processes), sorted({host.removeprefix("::ffff:") for host in hosts}))
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.readline()
cluster.close()
"""


@pytest.mark.slow
def test_local_cluster_listens_on_loopback_and_can_be_joined() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("['127.0.0.1']\n")
        address = process.stdout.readline().strip()
        join = f"from rayzero.orchestrator.cluster.connect import *; connect({address!r}).close()"
        subprocess.run([sys.executable, "-c", join], check=True, timeout=60)
        process.communicate("\n", timeout=60)
    assert process.returncode == 0
