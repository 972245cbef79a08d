"""What a stage finds. Its file is replaced at every finding, so that a killed stage keeps them.

This module imports no torch: the process that runs the stages must not touch the GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any


class StageSkippedError(Exception):
    """The stage cannot run on this machine; the text says why."""


@dataclass(frozen=True)
class Settings:
    """What a stage's process is given.

    Attributes:
        device: `cuda` or `cpu`.
        small: tiny shapes, to try the script itself; always so on a CPU.
        limit_s: after it the stage's process is killed.
        systems: of the comparison; empty for its default.
        folder: for files of the stage, removed afterwards.
        select: an expression for pytest's -k; empty for the stage's own selection.
    """

    device: str
    small: bool
    limit_s: float
    systems: Sequence[str]
    folder: str
    select: str = ""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


class Report:
    """A stage's findings, in its process.

    Attributes:
        document: `values`, by name; `checks`, each with `name`, `passed`, `seen` and `expected`;
            `skipped`, each with `name` and `reason`; `error`, empty without one; `finished`,
            whether the stage ended by itself; `stage_skipped`, why all of it was.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        self.document: dict[str, Any] = empty_document()
        self._path = path
        self._deadline_s = monotonic() + limit_s
        self._write()

    @property
    def left_s(self) -> float:
        """Seconds until the stage is killed."""
        return self._deadline_s - monotonic()

    def value(self, name: str, value: Any) -> None:
        """Records a measurement. Its unit ends its name: `_s`, `_ms`, `_gb_s`, `_bytes`."""
        self.document["values"][name] = value
        self._write()

    def check(self, name: str, passed: bool, seen: object, expected: str) -> None:
        """Records something that must hold. The stage continues if it does not."""
        entry = {"name": name, "passed": bool(passed), "seen": str(seen), "expected": expected}
        self.document["checks"].append(entry)
        self._write()

    def skip(self, name: str, reason: str) -> None:
        """Records a part of the stage that cannot run here."""
        self.document["skipped"].append({"name": name, "reason": reason})
        self._write()

    def finish(self, error: str = "", stage_skipped: str = "") -> None:
        self.document.update(finished=True, error=error, stage_skipped=stage_skipped)
        self._write()

    def _write(self) -> None:
        write_json(self._path, self.document)


def empty_document() -> dict[str, Any]:
    lists: dict[str, Any] = {"values": {}, "checks": [], "skipped": []}
    return lists | {"error": "", "finished": False, "stage_skipped": ""}


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replaces the file as a whole, so that a reader never sees a part of it."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(document, indent=2) + "\n")
    os.replace(beside, path)
