"""Kills workers of launched scripts: with Trainer, with Accelerate, with a torch DataLoader.

    python -m benchmarks.launch_repair
    python -m benchmarks.launch_repair --kills 5 --only trainer --json repair.json

`rayzero launch --workers 1:2` runs each script on a Ray cluster of its own, once undisturbed and
once with kills: when both workers have finished some steps, SIGKILL goes to one of them at a
random point of a step; the other one continues alone, until a replacement joins. No finished step
may be done again, every sample is used once in an epoch, and the weights are those without kills
(float64, 1e-9). It prints each repair: from the kill to the end of the next new step, less that
step; and the time between two steps where a replacement joins.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.machine import describe_machine, format_machine
from benchmarks.recovery import PARTS
from tests.workers.launch.support import find_problems, weight_difference

SCRIPTS = Path("tests/workers/launch/scripts")
SAMPLES, BATCH = 240, 4
UNDISTURBED_STEPS = 8
TIMEOUT_S = 280.0
TOLERANCE = 1e-9
# At the learning rate of the script's test (1e-2) training is chaotic: a difference of 1e-15 after
# 120 steps is 2e-11 after 240, and 0.05 after 600.
EXAMPLES = {
    "trainer": tuple(("hf_trainer.py --every 25 --width 128 --layers 4 --lr=1e-3").split()),
    "accelerate": ("accelerated_loop.py", "--width", "512"),
    "loader": ("own_loader.py", "--dropout", "0"),
}


@dataclass(frozen=True)
class Repair:
    """One kill.

    Args:
        wall_s: from the kill to the end of the next step that was not finished before.
        step_s: that step's own time.
        parts: the seconds of each phase, as the job reports them.
    """

    step: int
    wall_s: float
    step_s: float
    steps_redone: int
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return self.wall_s - self.step_s


class LaunchError(Exception):
    """A launched script did not end as it must."""


def launch(script: str, args: Sequence[str], out: Path, *flags: str) -> subprocess.Popen[str]:
    """Starts `rayzero launch`; events come to its stdout, everything else to a file."""
    out.mkdir()
    command = [sys.executable, "-m", "rayzero", "launch", "--json", *flags]
    command += ["--set", f"checkpoint.path={out / 'runs'}", str(SCRIPTS / script)]
    with (out / "stderr").open("w") as errors:
        return subprocess.Popen(
            [*command, "--out", str(out), *args],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )


class Disturbance:
    """Kills workers of one launched script, by its events."""

    def __init__(self, process: subprocess.Popen[str], out: Path, kills: int, seed: int) -> None:
        self.repairs: list[Repair] = []
        self.growths_s: list[float] = []
        self._last: dict[str, Any] = {}
        self._process, self._out, self._kills = process, out, kills
        self._random = random.Random(seed)
        self._pids: list[int] = []
        self._killed_at_s = 0.0
        self._step = self._stable = self._generation = 0
        self._record: dict[str, Any] = {}

    def run(self) -> None:
        """Returns when the script has ended.

        Raises:
            LaunchError: it failed, or ended before all kills.
        """
        deadline_s = time.monotonic() + TIMEOUT_S
        try:
            for event in self._events():
                if time.monotonic() > deadline_s:
                    raise LaunchError(f"{self._out}: not at its end after {TIMEOUT_S:g} s")
                self._handle(event)
            code = self._process.wait(60)
        finally:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(60)
        if code:
            raise LaunchError(f"exit code {code}: {(self._out / 'stderr').read_text()[-3000:]}")
        if len(self.repairs) < self._kills:
            raise LaunchError(f"ended after {len(self.repairs)} of {self._kills} kills")

    def _events(self) -> Iterator[dict[str, Any]]:
        stdout = self._process.stdout
        yield from map(json.loads, stdout if stdout is not None else ())

    def _handle(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "workers":
                self._pids += [worker["pid"] for worker in event["workers"]]
            case "step":
                self._on_step(event)
            case "repaired" if self._killed_at_s:
                self._on_repaired(event)

    def _on_step(self, record: dict[str, Any]) -> None:
        if self._last and record["world_size"] > self._last["world_size"]:
            self.growths_s.append(record["at_s"] - self._last["at_s"])
        self._last = record
        if self._killed_at_s:
            if record["generation"] != self._generation and not self._record:
                self._record = record
            return
        self._step, self._generation = record["step"], record["generation"]
        self._stable = self._stable + 1 if record["world_size"] == 2 else 0
        if self._stable >= UNDISTURBED_STEPS and len(self.repairs) < self._kills:
            time.sleep(self._random.uniform(0.0, record["step_s"]))
            self._pids = [pid for pid in self._pids if Path(f"/proc/{pid}").exists()]
            pid = self._random.choice(self._pids)
            self._pids.remove(pid)
            self._killed_at_s = time.time()
            os.kill(pid, signal.SIGKILL)

    def _on_repaired(self, event: dict[str, Any]) -> None:
        wall_s, step_s = self._record["at_s"] - self._killed_at_s, self._record["step_s"]
        redone = event["steps_redone"]
        self.repairs.append(Repair(self._step, wall_s, step_s, redone, event["seconds"]))
        self._killed_at_s, self._record, self._stable = 0.0, {}, 0
        if len(self.repairs) == self._kills:
            (self._out / "fast").touch()


def measure(example: str, folder: Path, kills: int, steps: int, seed: int) -> Disturbance:
    """Runs a script undisturbed, then with kills.

    Raises:
        LaunchError: a run failed, or the killed one differs from the undisturbed one.
    """
    script, *args = EXAMPLES[example]
    epochs = steps * BATCH // SAMPLES
    args += ["--samples", str(SAMPLES), "--epochs", str(epochs)]
    plain = folder / f"{example}-plain"
    undisturbed = launch(script, args, plain, "--workers", "2")
    Disturbance(undisturbed, plain, 0, seed).run()
    killed = folder / f"{example}-killed"
    process = launch(script, [*args, "--pace-s", "0.02"], killed, "--workers", "1:2")
    disturbance = Disturbance(process, killed, kills, seed)
    disturbance.run()
    without_note = 0 if example == "trainer" else kills
    total = epochs * SAMPLES // BATCH
    # The kill waits for a part of a step: another one may begin meanwhile.
    unreported = {repair.step + more for repair in disturbance.repairs for more in (1, 2)}
    problems = find_problems(killed, total, SAMPLES, epochs, without_note, unreported)
    if redone := sum(repair.steps_redone for repair in disturbance.repairs):
        problems.append(f"{redone} finished steps were done again")
    if (difference := weight_difference(plain, killed)) > TOLERANCE:
        problems.append(f"the weights differ by {difference:g} from the undisturbed run's")
    if problems:
        raise LaunchError(f"{example}: " + "; ".join(problems))
    return disturbance


def show(console: Console, example: str, disturbance: Disturbance) -> None:
    repairs, growths_s = disturbance.repairs, disturbance.growths_s
    for number, repair in enumerate(repairs, start=1):
        parts = ", ".join(f"{part} {1e3 * repair.parts.get(part, 0):.0f}" for part in PARTS[1:])
        console.print(
            f"{example}, kill {number} after step {repair.step}: {1e3 * repair.total_s:.0f} ms, "
            f"and the step {1e3 * repair.step_s:.0f} ms ({parts})"
        )
    times = [repair.total_s for repair in repairs]
    console.print(
        f"{example}: {len(times)} kills, median {median(times):.3f} s, longest {max(times):.3f} s "
        "beyond a step; 0 finished steps again, every sample once, weights as without kills"
    )
    if growths_s:
        console.print(
            f"{example}: {len(growths_s)} times a new worker joined; from a step's end to the "
            f"next: median {median(growths_s):.3f} s, at most {max(growths_s):.3f} s"
        )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launch_repair",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=4, help="of each script")
    parser.add_argument("--steps", type=int, default=1200, help="of each script: for all kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*EXAMPLES], help="one of the scripts")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to this file")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the workers
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # the cluster is local
    console, machine = Console(), describe_machine()
    result: dict[str, Any] = {"machine": machine}
    with tempfile.TemporaryDirectory(prefix="launch-repair-") as folder:
        for example in [options.only] if options.only else EXAMPLES:
            try:
                measured = measure(
                    example, Path(folder), options.kills, options.steps, options.seed
                )
            except LaunchError as error:
                console.print(f"[red]{error}[/red]")
                return 1
            show(console, example, measured)
            result[example] = {
                "repairs": [asdict(it) | {"total_s": it.total_s} for it in measured.repairs],
                "growths_s": measured.growths_s,
            }
    console.print(format_machine(machine))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
