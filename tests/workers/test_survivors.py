"""What survives the changes of a job's ranks: the training function, its objects, no resources.

Real processes and a vault, without Ray. The oracle is plain torch.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.vault.server import _MAX_DISCONNECTED as MAX_DISCONNECTED
from tests.support.nccl_like.settings import from_environment
from tests.workers.event_controller import (
    MOST,
    PHASES,
    SPACING,
    Event,
    EventController,
    draw,
    fault,
)
from tests.workers.local_workers import LocalWorkers, check_results
from tests.workers.recovery_jobs import SAMPLES, engine_config
from tests.workers.support import mirrored_setup
from tests.workers.survivor_jobs import NOTES, compiled_config, iterable_data

EVENTS = int(os.environ.get("RAYZERO_SURVIVOR_EVENTS", "6"))
REPAIRS = int(os.environ.get("RAYZERO_SURVIVOR_REPAIRS", "9"))
SEED = int(os.environ.get("RAYZERO_SURVIVOR_SEED", "0"))
DIVISIONS = (1, 4)
"""In place of these repairs samples are divided anew: the kills after them are of uneven ranks."""
LOOKS = 10 if REPAIRS >= 40 else 3
MOST_MORE = {"descriptors": 4, "threads": 2, "mappings": 4, "shared_bytes": 1 << 20}
"""A mirror, or the release of a slot, may be running."""
MOST_OBJECTS = 300 if from_environment() else 30
"""Python objects, more at the end: a batch that is read ahead is two, with its storage; those of a
mirror, which runs concurrently with training on NCCL's semantics."""
MOST_KB_PER_REPAIR = 64
"""Of host memory, in the second half: as many steps without repairs take half of that."""
pytestmark = pytest.mark.slow


def run_events(
    folder: Path,
    events: Sequence[Event],
    config: dict[str, Any],
    *,
    order: int | None = None,
    look: Callable[[list[int]], None] = lambda pids: None,
    **args: Any,
) -> EventController:
    """A job of three workers that ends like plain torch, each step told once. For `order` and
    `look` see `EventController`."""
    steps = events[-1].step + SPACING
    gates = [event.step for event in events if not event.faults]
    faults = tuple(fault for event in events for fault in event.faults)
    spec = mirrored_setup(
        folder,
        "tests.workers.survivor_jobs:train",
        engine_config=config,
        args={"gates": gates} | args,
        faults=faults,
        steps=steps,
    )
    local = LocalWorkers(spec, MOST)
    try:
        controller = EventController(local, events, order, look)
        controller.run(240 + 10 * len(events))
        assert controller.wrong == []
        assert sorted(fired.fault for fired in FaultRecord(folder).read()) == sorted(faults)
        told = local.told_steps(controller.starts)
        assert told == [*range(1, steps + 1)], "no step was lost, or done again"
        is_iterable = "iterable" in args
        check_results(local, steps, iterable_data(0).order(SAMPLES) if is_iterable else None)
        return controller
    finally:
        local.close()


def read_notes(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What each process has noted, by its id."""
    notes: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in (folder / NOTES).read_text().splitlines():
        values = json.loads(line)
        notes[values.pop("pid")].append(values)
    return notes


def test_function_and_its_objects_survive_random_events(tmp_path: Path) -> None:
    """Kills, stops, resizes and drains: each process enters the function once, and has the same
    objects before and after each of them, and the readers of its data go from rank to rank."""
    events = draw(SEED, EVENTS)
    config = compiled_config(SEED % 4)
    controller = run_events(tmp_path, events, config, order=SEED, iterable=True)
    assert len(controller.starts) > len(events)
    changes = 0
    for entry, *later in read_notes(tmp_path).values():
        assert entry == {"entries": 1}
        graphs = {values.pop("graphs") for values in later} - {0}  # 0: before its first forward
        assert len(graphs) <= 1, later
        assert all(values == later[0] for values in later), later
        changes += len(later)
    assert changes > len(events)
    print(Counter(event.kind for event in events), len(controller.starts), changes)


def test_repairs_leave_nothing_behind(tmp_path: Path) -> None:
    """One rank is killed and replaced again and again: what the two others and their vault hold
    does not grow."""
    events: list[Event] = []
    for number in range(1, REPAIRS + 1):
        step = SPACING * number
        kill = fault("kill", 2, step, PHASES[number % 7])
        is_kill = number not in DIVISIONS
        events.append(Event(step, "replace", (kill,)) if is_kill else Event(step, "divide"))
        if number % (REPAIRS // LOOKS) == 0:
            events.append(Event(step + SPACING - 1, "look"))
    seen: defaultdict[int, list[dict[str, int]]] = defaultdict(list)

    def look(pids: list[int]) -> None:
        for pid in (os.getpid(), *pids[:2]):  # the vault is in this process
            seen[pid].append(resources(pid))

    looks_at = [event.step for event in events if event.kind == "look"]
    counts = [looks_at[0], looks_at[-1]]
    config = engine_config(SEED % 4)
    controller = run_events(tmp_path, events, config, look=look, counts=counts)
    assert controller.divided == len(DIVISIONS)
    notes = read_notes(tmp_path)
    assert len(seen) == 3
    for pid, looks in seen.items():
        print(pid, *looks, sep="\n")
        first, last = looks[0], looks[-1]
        assert all(last[name] <= first[name] + more for name, more in MOST_MORE.items()), looks
        assert last["pidfds"] <= MAX_DISCONNECTED + 2 * MOST
        if pid != os.getpid():
            live = [note["live"] for note in notes[pid] if "live" in note]
            print(live)
            assert len(live) == 2
            assert live[1] <= live[0] + MOST_OBJECTS
            if REPAIRS >= 40:
                half = looks[len(looks) // 2]["private_kb"]
                assert last["private_kb"] - half <= MOST_KB_PER_REPAIR * REPAIRS / 2


def resources(pid: int) -> dict[str, int]:
    """What a process holds. `pidfds`: those of lost workers, which a vault keeps."""
    folder, links = Path(f"/proc/{pid}"), []
    for path in (folder / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            links.append((os.readlink(path), path.stat().st_size))
    pidfds = sum("pidfd" in link for link, _ in links)
    private = re.findall(r"Private_\w+: +(\d+) kB", (folder / "smaps_rollup").read_text())
    return {
        "pidfds": pidfds,
        "descriptors": len(links) - pidfds,
        "threads": len(os.listdir(folder / "task")),
        "mappings": (folder / "maps").read_text().count("/memfd:"),
        "shared_bytes": sum(size for link, size in links if link.startswith("/memfd:")),
        "private_kb": sum(map(int, private)),
    }
