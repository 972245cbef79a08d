"""One job on a token head: its job file, and its status from metrics, files and commands."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import yaml

from rayzero.orchestrator.journal.files import read_journal
from tests.support.ports import free_ports
from tests.support.token_head import TokenHead, wait_for

TIMEOUT_S = 240.0
MODEL = {"layers": 4, "width": 128, "heads": 4, "context": 128}
ENDLESS_STEPS = 1_000_000
CHECKPOINT_INTERVAL = 20
ENGINE = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": 2},
}
EMPTY_SNAPSHOT: dict[str, Any] = {
    "progress": {"step": 0},
    "recoveries": [],
    "faults": [],
    "checkpoints": [],
}


class ExpectationError(Exception):
    """A requirement of the benchmark is violated."""


def expect(condition: bool, details: object) -> None:
    if not condition:
        raise ExpectationError(str(details))


class MonitoredJob:
    """The GPT example as a named job.

    Args:
        data: folder with the prepared training data.
        pause_s: before each micro-step.
    """

    def __init__(self, head: TokenHead, name: str, data: Path, pause_s: float) -> None:
        self.name = name
        (self.port,) = free_ports(1)
        self._head = head
        self._args = {**MODEL, "data": str(data), "pause_s": pause_s}
        self._runs = head.folder / "runs"
        self.folder = self._runs / name

    def submit(self, submission_id: str, steps: int = ENDLESS_STEPS) -> None:
        """Run `ray job submit` and return when Ray has accepted the job."""
        command = ["python3", "-m", "rayzero", "run", str(self.write_job_file(steps))]
        done = self._head.ray_job(
            "submit", "--no-wait", "--submission-id", submission_id, "--", *command
        )
        # a busy dashboard may close the connection after accepting the job
        accepted = done.returncode == 0 or self.ray_status(submission_id)
        expect(bool(accepted), done.stdout + done.stderr)

    def write_job_file(self, steps: int) -> Path:
        document = {
            "name": self.name,
            "entrypoint": "benchmarks.paced_gpt:train",
            "args": self._args,
            "engine": ENGINE,
            "workers": {"min": 1, "max": 2},
            "steps": steps,
            "checkpoint": {"path": str(self._runs), "every_steps": CHECKPOINT_INTERVAL},
            "recovery": {"max_faults": 1},
            "metrics": {"port": self.port, "jsonl": True},
        }
        path = self._head.folder / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path

    @property
    def url(self) -> str:
        """The page that the job's log named last: another one if `port` was in use by then."""
        try:
            log = (self.folder / "logs" / "job.log").read_text(encoding="utf-8")
        except FileNotFoundError:
            log = ""
        named = re.findall(r"^page: (http\S+)/ ", log, re.MULTILINE)
        return named[-1] if named else f"http://127.0.0.1:{self.port}"

    def snapshot(self) -> dict[str, Any]:
        """The job's metrics snapshot; empty if the job has not started."""
        try:
            with urlopen(f"{self.url}/snapshot.json", timeout=10) as response:
                snapshot: dict[str, Any] = json.loads(response.read())
                return snapshot
        except OSError:
            return EMPTY_SNAPSHOT

    @property
    def step(self) -> int:
        return int(self.snapshot()["progress"]["step"])

    @property
    def last_step_at_s(self) -> float:
        """Unix time of the last step; 0 before the first step."""
        return float(self.snapshot()["progress"].get("last_step_at_s") or 0)

    @property
    def checkpoint_step(self) -> int:
        """Step of the latest checkpoint."""
        return max((c["step"] for c in self.snapshot()["checkpoints"]), default=0)

    @property
    def repairs(self) -> list[dict[str, Any]]:
        return [r for r in self.snapshot()["recoveries"] if r["kind"] == "repair"]

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: self.step >= step, TIMEOUT_S, f"step {step}")

    def wait_for_step_after(self, unix_s: float) -> None:
        """Wait for a step that finished after the given Unix time."""
        wait_for(lambda: self.last_step_at_s > unix_s, TIMEOUT_S, "a new step")

    def status(self) -> dict[str, Any]:
        """Output of `rayzero status --json`."""
        done = self._head.rayzero("status", self.name, "--json", "--path", str(self._runs))
        expect(done.returncode == 0, done.stdout + done.stderr)
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    @property
    def journal_end_state(self) -> str:
        """Final state recorded in the journal; empty while the job runs."""
        journal = read_journal(str(self.folder))
        return journal.end_state if journal is not None else ""

    def ray_status(self, submission_id: str) -> str:
        """Ray's status of a submission; empty if it does not exist."""
        info = self._head.get_json(f"/api/jobs/{submission_id}")
        return "" if info is None else str(info["status"])

    def find_processes(self, pattern: str) -> list[psutil.Process]:
        """Processes of the head whose command line contains `pattern`, except shells."""
        matches = []
        for process in self._head.processes():
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if pattern in " ".join(command) and Path(command[0]).name not in ("sh", "bash"):
                matches.append(process)
        return matches

    def metrics(self) -> list[dict[str, Any]]:
        """Records of `metrics.jsonl`, except a partially written last line."""
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def losses(self) -> dict[int, float]:
        """Loss by step; the last one if a step was repeated."""
        return {record["step"]: record["loss"] for record in self.metrics()}

    def count_repeated_steps(self) -> int:
        """Number of steps that the latest generation repeated after its start."""
        generation = int(self.snapshot()["generation"])
        deadline = time.monotonic() + TIMEOUT_S
        while not (new := [r["step"] for r in self.metrics() if r["generation"] == generation]):
            expect(time.monotonic() < deadline, f"no step of generation {generation} in the file")
            time.sleep(0.1)
        previous = max(r["step"] for r in self.metrics() if r["generation"] < generation)
        return previous - new[0] + 1
