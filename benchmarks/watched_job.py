"""One job on a token head: its file, and what its page, its files and the commands tell of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import yaml

from benchmarks.ports import free_ports
from benchmarks.token_head import TokenHead, wait_for
from rayzero.orchestrator.journal.files import read_journal

LIMIT_S = 240.0
MODEL = {"layers": 4, "width": 128, "heads": 4, "context": 128}
FOREVER = 1_000_000
EVERY_STEPS = 20
ENGINE = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": 2},
}
NOT_THERE: dict[str, Any] = {
    "progress": {"step": 0},
    "recoveries": [],
    "faults": [],
    "checkpoints": [],
}


class NotSoError(Exception):
    """Something is not as it should be."""


def expect(so: bool, seen: object) -> None:
    if not so:
        raise NotSoError(str(seen))


class WatchedJob:
    """The demo under a name.

    Args:
        data: the demo's.
    """

    def __init__(self, head: TokenHead, name: str, data: Path) -> None:
        self.name = name
        (self.port,) = free_ports(1)
        self._head = head
        self._data = data
        self._runs = head.folder / "runs"
        self.folder = self._runs / name

    def submit(self, id_: str, steps: int = FOREVER) -> None:
        """`ray job submit`; returns when it was taken."""
        command = ["python3", "-m", "rayzero", "run", str(self.file(steps))]
        done = self._head.ray_job("submit", "--no-wait", "--submission-id", id_, "--", *command)
        taken = done.returncode == 0 or self.ray_status(id_)  # a busy dashboard may hang up
        expect(bool(taken), done.stdout + done.stderr)

    def file(self, steps: int) -> Path:
        """A job file for so many steps."""
        document = {
            "name": self.name,
            "entrypoint": "examples.gpt.train:train",
            "args": {**MODEL, "data": str(self._data)},
            "engine": ENGINE,
            "workers": {"min": 1, "max": 2},
            "steps": steps,
            "checkpoint": {"path": str(self._runs), "every_steps": EVERY_STEPS},
            "recovery": {"max_faults": 1},
            "metrics": {"port": self.port, "jsonl": True},
        }
        path = self._head.folder / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path

    def snapshot(self) -> dict[str, Any]:
        """What the page shows; a job that has not begun is at step 0."""
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/snapshot.json", timeout=10) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except OSError:
            return NOT_THERE

    @property
    def step(self) -> int:
        return int(self.snapshot()["progress"]["step"])

    @property
    def last_step_at_s(self) -> float:
        """As Unix time; 0 while there is none."""
        return float(self.snapshot()["progress"].get("last_step_at_s") or 0)

    @property
    def checkpoint(self) -> int:
        """The newest's step."""
        return max((one["step"] for one in self.snapshot()["checkpoints"]), default=0)

    @property
    def repairs(self) -> list[dict[str, Any]]:
        return [one for one in self.snapshot()["recoveries"] if one["kind"] == "repair"]

    def reach(self, step: int) -> None:
        wait_for(lambda: self.step >= step, LIMIT_S, f"step {step}")

    def step_after(self, unix_s: float) -> None:
        """Waits for a step that was finished later than that."""
        wait_for(lambda: self.last_step_at_s > unix_s, LIMIT_S, "a new step")

    def status(self) -> dict[str, Any]:
        """What `rayzero status` says."""
        done = self._head.rayzero("status", self.name, "--json", "--path", str(self._runs))
        expect(done.returncode == 0, done.stdout + done.stderr)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    @property
    def journal_ended(self) -> str:
        """How it ended, by its journal; empty while it has not."""
        past = read_journal(str(self.folder))
        return past.end_state if past is not None else ""

    def ray_status(self, id_: str) -> str:
        """What Ray says of a submission; empty when it knows none."""
        found = self._head.asked(f"/api/jobs/{id_}")
        return "" if found is None else str(found["status"])

    def processes(self, words: str) -> list[psutil.Process]:
        """Of the head's family, those with these words in their command line, shells not."""
        found = []
        for one in self._head.family():
            try:
                line = one.cmdline()
            except psutil.Error:
                continue
            if words in " ".join(line) and Path(line[0]).name not in ("sh", "bash"):
                found.append(one)
        return found

    def lines(self) -> list[dict[str, Any]]:
        """`metrics.jsonl`, but for a line that is being written."""
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def losses(self) -> dict[int, float]:
        """By step; of a step that was done again, the last."""
        return {one["step"]: one["loss"] for one in self.lines()}

    def done_again(self) -> int:
        """Steps of the newest generation's beginning that an older one had done already."""
        newest = int(self.snapshot()["generation"])
        until_s = time.monotonic() + LIMIT_S
        while not (new := [one["step"] for one in self.lines() if one["generation"] == newest]):
            expect(time.monotonic() < until_s, f"no step of generation {newest} in the file")
            time.sleep(0.1)
        return max(one["step"] for one in self.lines() if one["generation"] < newest) - new[0] + 1
