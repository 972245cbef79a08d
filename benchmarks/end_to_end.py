"""The whole life cycle of a job on one machine.

    python -m benchmarks.end_to_end

A job is submitted to a cluster with token authentication and scraped by Prometheus. Its driver, a
worker and the whole head are killed; it is adopted, stopped, and finished. Its losses must equal
those of an undisturbed run, and nothing may be leaked. Prometheus is taken from RAYZERO_PROMETHEUS
or PATH; without it, the scraping is skipped and reported as such.
"""

from __future__ import annotations

import argparse
import email
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

from benchmarks.leaks import find_cluster_leaks, find_temporary_files, list_shared_memory
from benchmarks.machine import describe_machine, format_machine
from benchmarks.monitored_job import (
    CHECKPOINT_INTERVAL,
    TIMEOUT_S,
    ExpectationError,
    MonitoredJob,
    expect,
)
from benchmarks.scraper import Scraper, scraping
from examples.gpt.prepare import prepare
from tests.support.token_head import TokenHead, wait_for

LOSS_TOLERANCE = 1e-3


class Lifecycle:
    """One job life cycle. Each phase adds to `seconds` and `results`.

    Args:
        folder: for all files that are written.
        interval: minimum number of steps between two events.
        pause_s: of the job before each micro-step.
        forks: of `TokenHead`.
    """

    def __init__(self, folder: Path, interval: int, pause_s: float, forks: bool) -> None:
        self.seconds: dict[str, float] = {}
        self.results: dict[str, Any] = {}
        self._interval = interval
        self._data = folder / "data"
        self._head = TokenHead(folder, cpus=3, forks=forks)
        self._job = MonitoredJob(self._head, "end-to-end", self._data, pause_s)

    def run(self) -> None:
        """Run all phases.

        Raises:
            ExpectationError: a requirement was violated.
            TimeoutError: a phase did not complete.
        """
        before = list_shared_memory()
        prepare(self._data, Path(email.__file__).parent)  # a small data set is sufficient
        try:
            self.seconds["head: started, with dashboard and token"] = self._head.start()
            with scraping(self._job.port, self._head.folder / "prometheus") as scraper:
                with self._timed("submit to first step"):
                    self._job.submit("first")
                    self._job.wait_for_step_after(0)
                self._check_monitoring(scraper)
                self._kill_driver()
                self._kill_worker(scraper)
            self._kill_head()
            self._stop()
            self._finish()
            self._compare_losses()
            self.results["cluster leaks"] = find_cluster_leaks(self._head)
        finally:
            self._head.close()
        leaks = {*list_shared_memory() - before, *find_temporary_files(self._head.temporary)}
        self.results["machine leaks"] = sorted(leaks)

    def _check_monitoring(self, scraper: Scraper | None) -> None:
        with (
            self._timed("page"),
            urlopen(f"{self._job.url}/", timeout=20) as page,
        ):
            self.results["page bytes"] = len(page.read())
        self._job.wait_for_step(self._interval)
        if scraper is None:
            self.results["Prometheus"] = "not installed: nothing was scraped"
            return
        wait_for(lambda: scraper.value("rayzero_steps_total"), TIMEOUT_S, "a scrape")
        wait_for(lambda: not scraper.unhealthy(), TIMEOUT_S, "evaluation of all rules")
        self.results["alerts before the fault"] = sorted(scraper.firing())

    def _kill_driver(self) -> None:
        """Kill the driver. The job must not be affected, and another client can query it."""
        step_before = self._job.step
        (driver,) = self._job.find_processes("-m rayzero run")
        driver.send_signal(signal.SIGKILL)
        with self._timed("driver killed: detected by Ray"):
            wait_for(lambda: self._job.ray_status("first") == "FAILED", TIMEOUT_S, "a lost driver")
        with self._timed("status from another client"):
            status = self._job.status()
        expect(status["state"] == "running", status)
        self._job.wait_for_step(step_before + self._interval)
        self.results["generation after driver loss"] = self._job.snapshot()["generation"]

    def _kill_worker(self, scraper: Scraper | None) -> None:
        victim = self._job.find_processes("ray::WorkerActor")[-1]
        killed_at_s = time.time()
        victim.send_signal(signal.SIGKILL)
        wait_for(lambda: self._job.repairs, TIMEOUT_S, "a repair")
        repair = self._job.repairs[-1]
        detection_s = self._job.snapshot()["faults"][-1]["at_s"] - killed_at_s
        self.seconds["worker killed: until detected"] = detection_s
        self.seconds["worker killed: until the next finished step"] = repair["at_s"] - killed_at_s
        self.results["steps repeated after worker loss"] = repair["steps_redone"]
        if scraper is not None:
            query = 'sum(rayzero_faults_total{cause="lost"})'
            wait_for(lambda: scraper.value(query), TIMEOUT_S, "the fault in the metrics")
            wait_for(scraper.firing, TIMEOUT_S, "the alert on the spent fault budget")
            self.results["alerts after the fault"] = sorted(scraper.firing())

    def _kill_head(self) -> None:
        """Kill GCS, raylet, controller, workers and vaults at once. Only checkpoints survive."""
        wait_for(
            lambda: self._job.checkpoint_step >= CHECKPOINT_INTERVAL, TIMEOUT_S, "a checkpoint"
        )
        self._job.wait_for_step(self._job.checkpoint_step + 5)
        start_s = time.monotonic()
        self._head.kill()
        head_start_s = self._head.start()
        status = self._job.status()
        expect(status["state"] is None, status)
        submitted_at_s = time.time()
        with self._timed("head killed: from submit to the first new step"):
            self._job.submit("second")
            self._job.wait_for_step_after(submitted_at_s)
        total_s = time.monotonic() - start_s - head_start_s
        self.seconds["head killed: until that step, minus the new head's start"] = total_s
        log = self._job.folder / "logs" / "job.log"
        wait_for(lambda: "adopted a lost run" in log.read_text(), TIMEOUT_S, "an adoption")
        self.results["steps repeated after head loss"] = self._job.count_repeated_steps()

    def _stop(self) -> None:
        self._job.wait_for_step(self._job.step + self._interval)
        with self._timed("ray job stop: until stopped, with a last checkpoint"):
            done = self._head.ray_job("stop", "second")
            wait_for(lambda: self._job.journal_end_state == "stopped", TIMEOUT_S, "a stop")
        expect(done.returncode == 0, done.stdout + done.stderr)
        status = self._job.status()
        self.results["stopped at step"] = status["step"]
        self.results["last checkpoint"] = status["checkpoint_step"]
        self.results["Ray status of stopped job"] = self._job.ray_status("second")
        expect("state: stopping" in self._head.ray_job("logs", "second").stdout, "the job's log")

    def _finish(self) -> None:
        """Submit under the same name again, which resumes from the last checkpoint."""
        self.results["steps"] = self.results["stopped at step"] + self._interval
        final_states = ("SUCCEEDED", "FAILED", "STOPPED")
        with self._timed("submitted again, to its end"):
            self._job.submit("third", self.results["steps"])
            wait_for(lambda: self._job.ray_status("third") in final_states, TIMEOUT_S, "the end")
        self.results["Ray status of finished job"] = self._job.ray_status("third")

    def _compare_losses(self) -> None:
        reference = MonitoredJob(self._head, "undisturbed", self._data, pause_s=0.0)
        steps = self.results["steps"]
        done = self._head.rayzero("run", str(reference.write_job_file(steps)))
        expect(done.returncode == 0, done.stdout + done.stderr)
        losses, expected = self._job.losses(), reference.losses()
        expect(sorted(losses) == sorted(expected) == [*range(1, steps + 1)], "all steps")
        self.results["final loss"] = losses[steps]
        self.results["final loss, undisturbed"] = expected[steps]
        difference = max(abs(losses[step] - expected[step]) for step in expected)
        self.results["max loss difference"] = difference
        expect(difference < LOSS_TOLERANCE, self.results)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        self.seconds[phase] = time.monotonic() - start_s


def show(console: Console, lifecycle: Lifecycle) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    for phase, seconds in lifecycle.seconds.items():
        table.add_row(phase, f"{seconds:.2f}")
    console.print(table)
    for name, result in lifecycle.results.items():
        console.print(f"{name}: {result}", highlight=False)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--more", type=int, default=20, help="minimum steps between two events")
    parser.add_argument("--pause-s", type=float, default=0.0, help="pause before each micro-step")
    parser.add_argument(
        "--forks", action="store_true", help="start workers as a local cluster does"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to this file")
    options = parser.parse_args(arguments)
    console, machine = Console(), describe_machine()
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as folder:
        lifecycle = Lifecycle(Path(folder), options.more, options.pause_s, options.forks)
        try:
            lifecycle.run()
        except (ExpectationError, TimeoutError) as error:
            show(console, lifecycle)
            console.print(f"[red]{error}[/red]")
            for log in ("head.log", "runs/end-to-end/logs/job.log"):
                if (path := Path(folder, log)).exists():
                    text = path.read_text()
                    console.print(f"{log}:\n{text[:3000]}\n...\n{text[-3000:]}", highlight=False)
            return 1
    console.print(format_machine(machine))
    show(console, lifecycle)
    if options.json:
        report = machine | {"seconds": lifecycle.seconds, "results": lifecycle.results}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    leaks = lifecycle.results["cluster leaks"] or lifecycle.results["machine leaks"]
    return int(bool(leaks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
