"""Jobs by command, inside and outside a cluster that wants a token; and a lost head."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.token_head import TokenHead
from rayzero.orchestrator.journal.files import read_journal
from tests.integration.jobs.steady import ENGINE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LIMIT_S = 200


class Place:
    """A head with token authentication that can be killed, and commands beside it and outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.head = TokenHead(folder, cpus=3)
        self.head.start()

    def anew(self) -> None:
        """Kills the head with all of its processes, as a lost machine, and starts another."""
        self.head.kill()
        self.head.start()

    def command(self, *words: object, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rayzero", *map(str, words)],
            cwd=ROOT,
            env=self.head.env | changes,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def here(self, *words: object) -> subprocess.CompletedProcess[str]:
        return self.command(*words, "--address", self.head.address)

    def job_file(self, name: str, **changes: Any) -> Path:
        document = {
            "name": name,
            "entrypoint": "tests.integration.jobs.steady:train",
            "engine": ENGINE,
            "workers": {"min": 1},
            "steps": 1_000_000,
            "args": {"api_key": "very-secret"},
            "checkpoint": {"path": str(self.runs), "every_steps": 20},
            **changes,
        }
        folder = self.folder / "files"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    def status(self, name: str) -> dict[str, Any]:
        done = self.here("status", name, "--json", "--path", self.runs)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def until(there: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not there():
        assert time.monotonic() < until_s
        time.sleep(0.3)


def written(folder: Path) -> int:
    """The step that the journal has. It costs nothing to ask, where a command costs seconds."""
    past = read_journal(str(folder))
    return 0 if past is None else past.step


def stored(folder: Path) -> int:
    """The newest checkpoint's step; older ones go."""
    found = folder.glob("step-*/manifest.json")
    return max((int(one.parent.name.removeprefix("step-")) for one in found), default=0)


def ended(folder: Path) -> str:
    """How the run ended, by its journal; empty while it has not."""
    past = read_journal(str(folder))
    return "" if past is None else past.end_state


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("place"))
    yield made
    made.head.kill()


def test_a_job_by_command_from_outside_with_a_token(place: Place):
    """Submitted through the dashboard; asked from there and from the cluster; stopped."""
    path = place.job_file("outside")
    wrong = place.command("ls", "--address", place.head.dashboard, RAY_AUTH_TOKEN="0" * 64)
    assert wrong.returncode == 2, wrong.stdout
    assert wrong.stderr.startswith("error: the cluster at http://127.0.0.1:")
    assert "Traceback" not in wrong.stderr
    wrong = place.command("ls", "--address", place.head.address, RAY_AUTH_TOKEN="0" * 64)
    assert wrong.returncode == 2, wrong.stdout
    assert f"the Ray cluster at '{place.head.address}' rejected the auth token" in wrong.stderr
    sent = place.command("submit", path, "--address", place.head.dashboard)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    assert "outside: submitted; `rayzero logs -f outside` follows it" in sent.stdout
    until(lambda: written(place.runs / "outside") > 25)
    told = place.command("status", "outside", "--address", place.head.dashboard)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "outside: running at step " in told.stdout
    assert place.here("scale", "outside", "1:2").stdout == "outside: 1 to 2 workers; now 1\n"
    listed = json.loads(place.here("ls", "--json", "--path", place.runs).stdout)
    assert [(one["name"], one["state"]) for one in listed] == [("outside", "running")]
    log = place.here("logs", "outside").stdout
    assert "state: running\n" in log
    stopped = place.here("stop", "outside", "--path", place.runs)
    assert (stopped.returncode, stopped.stdout) == (0, "outside: stopped\n"), stopped.stderr
    after = place.status("outside")
    assert (after["state"], after["workers_max"]) == ("stopped", 2)
    assert after["checkpoint_step"] == after["step"]
    assert "state: stopping\n" in place.here("logs", "outside", "--path", place.runs).stdout
    # The cluster knows it, too, for who does not know the folder.
    told = place.here("status", "outside").stdout
    assert told.startswith(f"outside: stopped at step {after['step']} of 1000000\n"), told
    listed = place.here("ls", "--all")
    assert told.splitlines()[0] in listed.stdout.splitlines(), listed.stdout + listed.stderr
    assert "state: stopping\n" in place.here("logs", "outside").stdout
    files = b"".join(one.read_bytes() for one in place.runs.rglob("*") if one.is_file())
    assert b"very-secret" not in files
    assert place.head.token.encode() not in files


def test_a_lost_head_is_not_a_lost_run(place: Place):
    """Of two jobs on the head that is killed, one is adopted by a submit, one is given up."""
    path = place.job_file("adopted")
    given_up = place.runs / "given-up"
    assert place.here("submit", path).returncode == 0
    assert place.here("submit", place.job_file("given-up")).returncode == 0
    until(lambda: stored(place.runs / "adopted") >= 40 and written(given_up) > 0)
    assert place.status("adopted")["checkpoint_step"] >= 40
    elsewhere = place.command("run", path, RAY_AUTH_MODE="disabled")  # a cluster of its own
    assert elsewhere.returncode == 2, elsewhere.stdout
    assert f"{place.runs / 'adopted'} is in use: the process " in elsewhere.stderr
    until(lambda: written(place.runs / "adopted") >= 40)  # the journal is written behind
    place.anew()
    lost = place.status("adopted")
    assert (lost["state"], lost["generation"]) == (None, 1)
    assert lost["step"] >= 40
    other = place.here("run", path, "--set", "seed=3")
    assert other.returncode == 2
    assert "    seed: 0 -> 3\n" in other.stderr
    assert place.here("resume", "adopted", "--path", place.runs).returncode == 2, "a secret is out"
    assert place.here("submit", path).returncode == 0
    stopped = place.here("stop", "given-up", "--path", place.runs)
    assert stopped.stdout.startswith("given-up: the lost run is marked as stopped; its last step ")
    assert place.status("given-up")["state"] == "stopped"
    until(lambda: written(place.runs / "adopted") > lost["step"])
    now = place.status("adopted")
    assert now["generation"] > 1
    assert now["began_at_s"] == pytest.approx(lost["began_at_s"], abs=2)
    log = place.here("logs", "adopted").stdout
    assert f"adopted a lost run at step {lost['step']}, offline for " in log
