"""A job's whole life on one machine: submitted from outside a cluster that wants a token, scraped,
its driver killed, a worker killed, the whole head killed, adopted, stopped, finished.

    python -m benchmarks.end_to_end

The same training without any of that is run behind it: the losses must be the same, and nothing may
be left. Prometheus is found by RAYZERO_PROMETHEUS or on PATH; without one that part is left out,
and it is said.
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

from benchmarks.machine import facts, told
from benchmarks.remains import files_left, remains, shared_memory
from benchmarks.scraper import Scraper, scraping
from benchmarks.token_head import TokenHead, wait_for
from benchmarks.watched_job import EVERY_STEPS, LIMIT_S, NotSoError, WatchedJob, expect
from examples.gpt.prepare import prepare

LOSS_TOLERANCE = 1e-3


class Story:
    """One life; every part of it adds to `seconds` and `found`.

    Args:
        folder: for everything that is written.
        more: steps between one event and the next, at least.
    """

    def __init__(self, folder: Path, more: int) -> None:
        self.seconds: dict[str, float] = {}
        self.found: dict[str, Any] = {}
        self._more = more
        self._data = folder / "data"
        self._head = TokenHead(folder, cpus=3)
        self._job = WatchedJob(self._head, "end-to-end", self._data)

    def tell(self) -> None:
        """
        Raises:
            NotSoError, TimeoutError: a part of it went wrong.
        """
        before = shared_memory()
        prepare(self._data, Path(email.__file__).parent)  # a little text is enough
        try:
            self.seconds["head: started, with dashboard and token"] = self._head.start()
            with scraping(self._job.port, self._head.folder / "prometheus") as scraper:
                with self._timed("submit to first step"):
                    self._job.submit("first")
                    self._job.step_after(0)
                self._watch(scraper)
                self._kill_driver()
                self._kill_worker(scraper)
            self._kill_head()
            self._stop()
            self._finish()
            self._compare()
            self.found["left in the cluster"] = remains(self._head)
        finally:
            self._head.kill()
        left = {*shared_memory() - before, *files_left(self._head.temporary)}
        self.found["left on the machine"] = sorted(left)

    def _watch(self, scraper: Scraper | None) -> None:
        with (
            self._timed("page"),
            urlopen(f"http://127.0.0.1:{self._job.port}/", timeout=20) as page,
        ):
            self.found["page bytes"] = len(page.read())
        self._job.reach(self._more)
        if scraper is None:
            self.found["Prometheus"] = "none on this machine: nothing was scraped"
            return
        wait_for(lambda: scraper.value("rayzero_steps_total"), LIMIT_S, "a scrape")
        wait_for(lambda: not scraper.unhealthy(), LIMIT_S, "every rule is judged")
        self.found["alerts before the fault"] = sorted(scraper.firing())

    def _kill_driver(self) -> None:
        """The driver is gone at once; the job never knows. Another client follows it."""
        before = self._job.step
        (driver,) = self._job.processes("-m rayzero run")
        driver.send_signal(signal.SIGKILL)
        with self._timed("driver killed: Ray knows"):
            wait_for(lambda: self._job.ray_status("first") == "FAILED", LIMIT_S, "a dead driver")
        with self._timed("status from another client"):
            told = self._job.status()
        expect(told["state"] == "running", told)
        self._job.reach(before + self._more)
        self.found["generation after the driver's death"] = self._job.snapshot()["generation"]

    def _kill_worker(self, scraper: Scraper | None) -> None:
        victim = self._job.processes("ray::WorkerActor")[-1]
        killed_s = time.time()
        victim.send_signal(signal.SIGKILL)
        wait_for(lambda: self._job.repairs, LIMIT_S, "a repair")
        way = self._job.repairs[-1]
        noticed_s = self._job.snapshot()["faults"][-1]["at_s"] - killed_s
        self.seconds["worker killed: until its loss is told"] = noticed_s
        self.seconds["worker killed: until the next step is done"] = way["at_s"] - killed_s
        self.found["steps done again after the worker's death"] = way["steps_redone"]
        if scraper is not None:
            query = 'sum(rayzero_faults_total{cause="lost"})'
            wait_for(lambda: scraper.value(query), LIMIT_S, "the fault's series")
            wait_for(scraper.firing, LIMIT_S, "the alert of a spent budget")
            self.found["alerts after the fault"] = sorted(scraper.firing())

    def _kill_head(self) -> None:
        """GCS, raylet, controller, workers, vaults: all at once. The checkpoints are there."""
        wait_for(lambda: self._job.checkpoint >= EVERY_STEPS, LIMIT_S, "a checkpoint")
        self._job.reach(self._job.checkpoint + 5)
        began_s = time.monotonic()
        self._head.kill()
        start_s = self._head.start()
        stood = self._job.status()
        expect(stood["state"] is None, stood)
        submitted_s = time.time()
        with self._timed("head killed: from submit to the first new step"):
            self._job.submit("second")
            self._job.step_after(submitted_s)
        whole_s = time.monotonic() - began_s - start_s
        self.seconds["head killed: until that step, less the new head's start"] = whole_s
        log = self._job.folder / "logs" / "job.log"
        wait_for(lambda: "adopted a lost run" in log.read_text(), LIMIT_S, "an adoption")
        self.found["steps done again after the head's death"] = self._job.done_again()

    def _stop(self) -> None:
        self._job.reach(self._job.step + self._more)
        with self._timed("ray job stop: until stopped, with a last checkpoint"):
            done = self._head.ray_job("stop", "second")
            wait_for(lambda: self._job.journal_ended == "stopped", LIMIT_S, "a stop")
        expect(done.returncode == 0, done.stdout + done.stderr)
        after = self._job.status()
        self.found["stopped at step"] = after["step"]
        self.found["its last checkpoint"] = after["checkpoint_step"]
        self.found["what Ray says of a stopped job"] = self._job.ray_status("second")
        expect("state: stopping" in self._head.ray_job("logs", "second").stdout, "its log")

    def _finish(self) -> None:
        """The same name again, to an end: it goes on at the last checkpoint."""
        self.found["steps"] = self.found["stopped at step"] + self._more
        over = ("SUCCEEDED", "FAILED", "STOPPED")
        with self._timed("submitted again, to its end"):
            self._job.submit("third", self.found["steps"])
            wait_for(lambda: self._job.ray_status("third") in over, LIMIT_S, "the end")
        self.found["what Ray says of a finished job"] = self._job.ray_status("third")

    def _compare(self) -> None:
        plain, steps = WatchedJob(self._head, "undisturbed", self._data), self.found["steps"]
        done = self._head.rayzero("run", str(plain.file(steps)))
        expect(done.returncode == 0, done.stdout + done.stderr)
        ours, theirs = self._job.losses(), plain.losses()
        expect(sorted(ours) == sorted(theirs) == [*range(1, steps + 1)], "all steps")
        self.found["final loss"] = ours[steps]
        self.found["final loss, undisturbed"] = theirs[steps]
        apart = max(abs(ours[step] - theirs[step]) for step in theirs)
        self.found["largest difference of a step's loss"] = apart
        expect(apart < LOSS_TOLERANCE, self.found)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self.seconds[what] = time.monotonic() - began_s


def show(console: Console, story: Story) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("what")
    table.add_column("seconds", justify="right")
    for what, seconds in story.seconds.items():
        table.add_row(what, f"{seconds:.2f}")
    console.print(table)
    for what, found in story.found.items():
        console.print(f"{what}: {found}", highlight=False)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--more", type=int, default=20, help="steps between two events, at least")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there")
    options = parser.parse_args(arguments)
    console, about = Console(), facts()
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as folder:
        story = Story(Path(folder), options.more)
        try:
            story.tell()
        except (NotSoError, TimeoutError) as error:
            show(console, story)
            console.print(f"[red]{error}[/red]")
            for log in ("head.log", "runs/end-to-end/logs/job.log"):
                if (path := Path(folder, log)).exists():
                    console.print(f"{log}:\n{path.read_text()[-3000:]}", highlight=False)
            return 1
    console.print(told(about))
    show(console, story)
    if options.json:
        result = about | {"seconds": story.seconds, "found": story.found}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    left = story.found["left in the cluster"] or story.found["left on the machine"]
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
