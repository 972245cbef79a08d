"""Workers that run a launched script."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rayzero.orchestrator.spec_sections import LaunchSpec
from rayzero.workers.messages import SCRIPT_ENTRYPOINT
from tests.support.nccl_like.settings import from_environment
from tests.workers.local_controller import LocalController
from tests.workers.local_workers import LocalWorkers
from tests.workers.support import mirrored_setup

SCRIPTS = Path(__file__).parent / "scripts"


def make_workers(
    folder: Path, name: str, *args: str, count: int = 2, faults: tuple[str, ...] = ()
) -> LocalWorkers:
    if name in ("hf_trainer.py", "own_loader.py") and from_environment():
        pytest.skip("on CPUs objects are gathered in CPU memory, which NCCL does not take")
    launch = LaunchSpec(script=str(SCRIPTS / name), args=[*args]).model_dump()
    options: dict[str, Any] = {"args": launch, "steps": None, "ledger": False, "faults": faults}
    return LocalWorkers(mirrored_setup(folder, SCRIPT_ENTRYPOINT, **options), count)


def run_script(folder: Path, name: str, *args: str, count: int = 2) -> LocalController:
    """Runs a script on its workers to its end; repairs with what is left."""
    folder.mkdir()
    with closing(make_workers(folder, name, "--out", str(folder), *args, count=count)) as local:
        controller = LocalController(local)
        controller.run(120)
        assert controller.wrong == []
    return controller


class PlainRuns:
    """Runs of scripts that nothing disturbs, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[tuple[Any, ...], Path] = {}

    def __call__(self, name: str, *args: str, count: int = 2) -> Path:
        key = (name, *args, count)
        if key not in self._runs:
            folder = self._folder / str(len(self._runs))
            run_script(folder, name, *args, count=count)
            self._runs[key] = folder
        return self._runs[key]


def read_notes(folder: Path, name: str, rank: int | None = None) -> list[Any]:
    """What a rank, or all, have written to their files of this name, a JSON value a line."""
    lines: list[Any] = []
    for path in sorted(folder.glob(f"{name}-{'*' if rank is None else rank}")):
        lines += map(json.loads, path.read_text().splitlines())
    return lines


def find_problems(
    folder: Path,
    steps: int,
    samples: int,
    epochs: int,
    kills: int = 0,
    unreported: Collection[int] = (),
) -> list[str]:
    """What a script's notes say against: each step is finished once, with each sample once an
    epoch. Of a step that was interrupted, the last ones count, as many as a step has.

    Args:
        kills: a loop that was interrupted between a finished step and its note has no note of it.
        unreported: steps that a script may note, and do again: a rank was killed before all had
            reported them.
    """
    problems = []
    done_at_s: dict[int, float] = {}
    for at_s, step in sorted(read_notes(folder, "steps")):
        done_at_s.setdefault(step, at_s)
    missing = set(range(1, steps + 1)) - done_at_s.keys()
    if len(missing) > kills or len(done_at_s) + len(missing) != steps:
        problems.append(f"{len(done_at_s)} steps were finished, not {steps}")
    by_step: dict[int, list[int]] = {}
    for at_s, step, ids in sorted(read_notes(folder, "used")):  # the number of finished steps
        if step + 1 not in unreported and at_s > done_at_s.get(step + 1, at_s):
            problems.append(f"step {step + 1} was done again")
        by_step.setdefault(step, []).extend(ids)
    batch = samples * epochs // steps
    counts = Counter(it for ids in by_step.values() for it in ids[-batch:])
    expected = dict.fromkeys(range(samples), epochs)
    if counts != expected:
        problems.append(f"samples used wrongly: {dict(list((counts - Counter(expected)).items()))}")
    return problems


def weight_difference(folder: Path, other: Path) -> float:
    """The largest difference between two runs' final weights: rank 0's last ones, as a survivor may
    come to the end of the script before it is entered again."""
    own, others = (_flatten(read_notes(it, "weights", 0)[-1]) for it in (folder, other))
    return max(abs(a - b) for a, b in zip(own, others, strict=True))


def _flatten(value: Any) -> list[float]:
    return [it for part in value for it in _flatten(part)] if isinstance(value, list) else [value]
