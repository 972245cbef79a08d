"""Files through which the soak test and its training function talk.

They are in a folder of their own, which a fault of the job's folder does not reach. Every process
finds it by an environment variable, also while it imports the training function.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.faults import process_start_time
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FAULT_KINDS

FOLDER_VARIABLE = "RAYZERO_SOAK_FOLDER"
_DISRUPTION = re.compile(r"(\w+)\(step=(\d+)\)")


def format_disruption(name: str, step: int) -> str:
    return f"{name}(step={step})"


def parse_disruption(text: str) -> tuple[str, int] | None:
    """Name and step; None if the text is of the fault language."""
    match = _DISRUPTION.fullmatch(text)
    return (match[1], int(match[2])) if match and match[1] not in FAULT_KINDS else None


@dataclass(frozen=True)
class RankState:
    """What a rank reports at the beginning of each step; `step` are finished."""

    rank: int
    pid: int
    step: int
    world_size: int


class SoakControl:
    """The folder. Used by any process; every file is written or taken by one system call.

    Attributes:
        record: of the disruptions that have taken effect.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.record = FaultRecord(self.folder)

    @classmethod
    def from_environment(cls) -> SoakControl:
        return cls(os.environ[FOLDER_VARIABLE])

    def clear(self) -> None:
        """Removes what an earlier episode left."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def request(self, name: str, text: str = "") -> None:
        """Asks a process of the job to do something, once."""
        self._write(f"request-{name}", text)

    def requested(self, name: str) -> str | None:
        """The text of a request that nobody has taken yet."""
        with suppress(FileNotFoundError):
            return (self.folder / f"request-{name}").read_text()
        return None

    def take(self, name: str) -> bool:
        """Takes a request, unless there is none or another process has taken it."""
        try:
            os.rename(self.folder / f"request-{name}", self.folder / f"taken-{name}-{os.getpid()}")
        except FileNotFoundError:
            return False
        return True

    def die_if_requested(self, name: str) -> None:
        if self.take(name):
            os.kill(os.getpid(), signal.SIGKILL)

    def taken_by(self, name: str) -> set[int]:
        """Processes that took a request of that name, or marked it."""
        prefix = f"taken-{name}-"
        return {int(p.name.removeprefix(prefix)) for p in self.folder.glob(f"{prefix}*")}

    def mark(self, name: str) -> None:
        """As `take`, of a request that is for every process."""
        self._write(f"taken-{name}-{os.getpid()}", "")

    def report(self, state: RankState) -> None:
        self._write(f"rank-{state.pid}", json.dumps(asdict(state)))

    def has_reported(self) -> bool:
        """Whether this process has been a rank."""
        return (self.folder / f"rank-{os.getpid()}").exists()

    def ranks(self) -> list[RankState]:
        """The newest state of the ranks whose processes live, by rank."""
        states = []
        for path in self.folder.glob("rank-*"):
            with suppress(FileNotFoundError):
                states.append(RankState(**json.loads(path.read_text())))
        alive = [state for state in states if process_start_time(state.pid) is not None]
        return sorted(alive, key=lambda state: (state.rank, state.step))

    def _write(self, name: str, text: str) -> None:
        temporary = self.folder / f".{name}-{os.getpid()}"
        temporary.write_text(text)
        os.replace(temporary, self.folder / name)
