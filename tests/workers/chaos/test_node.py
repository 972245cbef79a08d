"""Node faults: when they are rejected, and their effects on processes of the test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from rayzero.engine.errors import EngineError
from rayzero.workers.chaos import node
from rayzero.workers.chaos.node import network_id, why_impossible
from rayzero.workers.chaos.spec import parse_fault

DROP, CUT = (
    parse_fault("drop_node(node=1, step=2)"),
    parse_fault("partition(node=1, step=2, seconds=0.5)"),
)


def test_vault_can_always_be_killed():
    assert why_impossible(parse_fault("kill_vault(node=0, step=1)"), True, network_id()) == ""
    code = (
        "from rayzero.workers.chaos.spec import parse_fault\n"
        "from rayzero.workers.chaos.node import inject_node_fault\n"
        "inject_node_fault(parse_fault('kill_vault(node=0, step=1)'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=300)
    assert done.returncode == -signal.SIGKILL


def test_faults_of_controllers_node_are_rejected():
    for fault in (DROP, CUT):
        assert "the job's controller runs on that node" in why_impossible(fault, True, "")


def test_node_is_dropped_by_its_raylet_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getpid()))
    assert "raylet is not known: found" in why_impossible(DROP, False, "")
    monkeypatch.delenv("RAY_RAYLET_PID")
    assert "raylet is not known: found" in why_impossible(DROP, False, "")


def test_network_shared_with_controller_is_not_partitioned(monkeypatch: pytest.MonkeyPatch):
    assert "shares its network with the job's controller" in why_impossible(
        CUT, False, network_id()
    )
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "command `ip`" in why_impossible(CUT, False, "elsewhere")


def test_drop_node_kills_all_processes_of_node():
    # A raylet, by its name, that is the parent of a vault and of a worker with a child.
    worker = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'])\n"
        "print('started', flush=True)\n"
        "child.wait()\n"
    )
    vault = (
        "from rayzero.workers.chaos.spec import parse_fault\n"
        "from rayzero.workers.chaos.node import inject_node_fault, why_impossible\n"
        "fault = parse_fault('drop_node(node=1, step=2)')\n"
        "print(repr(why_impossible(fault, False, '')), flush=True)\n"
        "input()\n"
        "inject_node_fault(fault)\n"
    )
    raylet = (
        "import subprocess, sys\n"
        "open('/proc/self/comm', 'w').write('raylet')\n"
        f"worker = subprocess.Popen([sys.executable, '-c', {worker!r}],\n"
        "    stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "worker.stdout.readline()\n"
        f"subprocess.run([sys.executable, '-c', {vault!r}])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", raylet], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdin
    assert process.stdout.readline() == "''\n"
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) == 3
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.wait(10) == -signal.SIGKILL
    assert psutil.wait_procs(below, timeout=10)[1] == []
    process.stdin.close()
    process.stdout.close()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None,
    reason="needs root and a separate network namespace",
)
def test_partition_restores_routes_after_vault_is_gone():
    code = (
        "import subprocess, time\n"
        "from rayzero.workers.chaos import node\n"
        "from rayzero.workers.chaos.spec import parse_fault\n"
        "def ip(*words): return subprocess.run(['ip', *words], capture_output=True, text=True,\n"
        "                                      check=True).stdout\n"
        "ip('link', 'add', 'wire', 'type', 'veth', 'peer', 'other')\n"
        "ip('addr', 'add', '10.9.0.1/24', 'dev', 'wire')\n"
        "ip('link', 'set', 'other', 'up'); ip('link', 'set', 'wire', 'up')\n"
        "ip('route', 'add', 'default', 'via', '10.9.0.254')\n"
        "fault = parse_fault('partition(node=1, step=2, seconds=0.5)')\n"
        "assert node.why_impossible(fault, False, 'elsewhere') == ''\n"
        "before = ip('-4', 'route')\n"
        "node.inject_node_fault(fault)\n"
        "until = time.monotonic() + 5\n"
        "while ip('-4', 'route') and time.monotonic() < until: time.sleep(0.02)\n"
        "assert ip('-4', 'route') == ''\n"
        "while len(ip('-4', 'route').splitlines()) < 2 and time.monotonic() < until:\n"
        "    time.sleep(0.02)\n"
        "assert sorted(ip('-4', 'route').split()) == sorted(before.split()), before\n"
    )
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("this machine has no namespaces to give")
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_failed_command_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node, "_active_interfaces", lambda: iter(["no-such-link"]))
    with pytest.raises(EngineError, match="the network could not be partitioned"):
        node.inject_node_fault(CUT)
