"""CPU usage of a node's agent: the real server in its own process, with the real streams.

Its workers are threads of this process, each with the sender of a real worker: a report of
`control_cluster.GAUGES` and a heartbeat for each step. A controller's end of the stream receives
them. The vault that shares an agent's process is not included.

    python -m benchmarks.control_agent --workers 8 --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.control_cluster import GAUGES
from benchmarks.machine import describe_machine, format_machine
from rayzero.orchestrator.cluster.node_links import NodeLink, WorkerMail
from rayzero.orchestrator.errors import VaultLostError
from rayzero.workers.agent.link import AgentAddress, Attach, worker_socket
from rayzero.workers.agent.message_sender import MessageSender
from rayzero.workers.agent.node_agent import AgentServer
from rayzero.workers.messages import Heartbeat, StepReport, WorkerMessage

WARMUP_S = 2.0


def serve(pipe: Connection, workers_socket: str) -> None:
    """Main function of the agent's process; returns when the pipe is closed."""

    def poll(timeout_s: float) -> Sequence[Any]:
        time.sleep(timeout_s)
        return ()

    agent = AgentServer("127.0.0.1", None, poll, lambda worker, pid, pidfd: None)
    agent.serve_workers(workers_socket)
    pipe.send((agent.port, agent.secret))
    try:
        pipe.recv()
    except EOFError:
        agent.close()


class Steps:
    """What a worker has to say: a finished step every `step_s`, at the same time as all others."""

    def __init__(self, rank: int, step_s: float) -> None:
        self._rank = rank
        self._step_s = step_s
        self._step = int(time.monotonic() / step_s)

    def poll(self, timeout_s: float) -> list[WorkerMessage]:
        del timeout_s  # a step is shorter
        self._step += 1
        time.sleep(max(0.0, self._step * self._step_s - time.monotonic()))
        gauges = dict.fromkeys(GAUGES, float(self._step)) | {"step_s": self._step_s}
        report = StepReport(1, self._rank, self._step, {}, gauges, time.time())
        return [report, Heartbeat(self._rank, self._step + 1, "forward", 0.0)]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, all its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(pipe: Connection, pid: int, socket: str, options: argparse.Namespace) -> str:
    port, secret = pipe.recv()
    received: Counter[str] = Counter()
    mail = WorkerMail()

    def receive(worker: int, messages: list[Any]) -> None:
        del worker
        received.update(type(message).__name__ for message in messages)

    link = NodeLink(AgentAddress("", "127.0.0.1", port, secret), Attach(0, b"benchmark"), mail)
    await link.attached()
    for worker in range(options.workers):
        mail.subscribe(worker, receive)
        MessageSender(socket, worker, Steps(worker, options.step_s).poll)
    await asyncio.sleep(WARMUP_S)
    received.clear()
    began_s, before_s = time.monotonic(), cpu_s(pid)
    await asyncio.sleep(options.seconds)
    share = (cpu_s(pid) - before_s) / (time.monotonic() - began_s)
    link.end(VaultLostError("the benchmark has ended"))
    counts = ", ".join(f"{number} {name}" for name, number in sorted(received.items()))
    cost = f"{options.workers} workers: {share:.2%} of a core"
    return f"{cost}; received in {options.seconds:g} s: {counts}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_agent",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds of a step")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    socket = worker_socket("benchmark", os.urandom(8).hex(), "node")
    own_pipe, agent_pipe = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    agent = context.Process(target=serve, args=(agent_pipe, socket), daemon=True)
    agent.start()
    agent_pipe.close()
    assert agent.pid is not None
    print(format_machine(describe_machine()))
    print(asyncio.run(measure(own_pipe, agent.pid, socket, options)))
    own_pipe.close()
    agent.join(5.0)
    agent.kill()


if __name__ == "__main__":
    main()
