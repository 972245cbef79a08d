"""Faults that somebody inflicts on purpose, or a broken machine as if: strangers, lies, takeovers.

Each function inflicts one on a running job of the soak test, checks that it took effect, and waits
until the job trains again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soak_target import NotHeldError, Target
from benchmarks.store_attack import AttackReport, attack_stores
from rayzero.engine.checkpoint.catalogue import CheckpointInfo, list_checkpoints, newest_complete
from rayzero.engine.checkpoint.format import MANIFEST_NAME
from rayzero.engine.checkpoint.verify import verify_checkpoint
from rayzero.workers.vault.slots import PAGE_BYTES, SlotHeader, read_header

BURST_S = 2.0
BURSTS = 4
"""At most, until a key was changed: they exist for milliseconds of a generation."""
KILL_AFTER_S = 0.3
SETTLE_S = 0.3
"""For a commit that was under way when the vaults were killed. New workers take seconds."""
LEAST_CHECKPOINTS = 2
"""The newest is damaged, an older one remains."""
TIMEOUT_S = 240.0
"""For a second cluster, and a controller's end."""
DETECTED = "does not match its checksum"
"""Of a damaged slot's error."""
FLIPPED_BYTES = 8


def attack_store(target: Target, rng: random.Random) -> None:
    """A stranger at the rendezvous store, while a generation trains and the next one forms."""
    reports: list[AttackReport] = []
    for _ in range(BURSTS):
        target.wait(lambda: len(target.workers()) >= 1, TIMEOUT_S, "a worker")
        workers = target.workers()
        killer = threading.Timer(KILL_AFTER_S, target.kill, [rng.choice(workers)])
        killer.start()
        reports.append(attack_stores(lambda known=workers: known, BURST_S, rng.randrange(2**31)))
        killer.join()
        if reports[-1].fired:
            break
        target.wait_until_repaired()
    text = "; ".join(map(str, reports))
    _log(target, text)
    if not any(report.fired for report in reports):
        raise NotHeldError(f"{target.text} reached no store: {text}")
    target.mark_fired()
    target.wait_until_repaired()


def corrupt_replica(target: Target, rng: random.Random) -> None:
    """Flips bytes in slots of the newest complete step, and kills all workers. At random in one
    rank's slot or in all of them: then the damage must be found."""
    before = _events(target).count(DETECTED)
    with _stopped(target.workers()) as workers:
        slots = _newest_complete_slots(target.vaults())
        if not slots:
            raise NotHeldError(f"{target.text}: no step is complete in the vaults")
        all_ranks = rng.random() < 0.5
        ranks = list(slots) if all_ranks else [rng.choice(list(slots))]
        for path, header in (slot for rank in ranks for slot in slots[rank]):
            _flip(path, header, rng)
        step = slots[ranks[0]][0][1].step
        for pid in workers:
            target.kill(pid)
    _log(target, f"slots of step {step} of ranks {ranks}")
    target.mark_fired()
    if all_ranks:
        target.wait(
            lambda: _events(target).count(DETECTED) > before, TIMEOUT_S, "an error of the checksum"
        )
    target.wait_until_repaired()


def corrupt_header(target: Target, rng: random.Random) -> None:
    """Damages the newest checkpoint's manifest, or the header of a file of it, when nothing but
    checkpoints is left of the state."""
    target.wait(
        lambda: sum(it.is_complete for it in _checkpoints(target)) >= LEAST_CHECKPOINTS,
        TIMEOUT_S,
        f"{LEAST_CHECKPOINTS} checkpoints",
    )
    for pid in (*target.vaults(), *target.workers()):
        target.kill(pid)
    time.sleep(SETTLE_S)
    newest = newest_complete(str(target.job_dir))
    if newest is None:
        raise NotHeldError(f"{target.text}: no complete checkpoint is left")
    what = rng.choice(("length", "header", "manifest"))
    _damage_checkpoint(newest, what, rng)
    if not any(problem.makes_unusable for problem in verify_checkpoint(newest.folder)):
        raise NotHeldError(f"{target.text}: the {what} was damaged, and `verify` does not see it")
    _log(target, f"{what} of step {newest.step}")
    target.mark_fired()
    target.wait_until_repaired()


def pause_controller(target: Target, rng: random.Random) -> None:
    """Stops the job's controller until another one has taken the job over, and continues it: it
    must end, with its workers, and write nothing. The other one waits for that at its end."""
    (controller,) = target.controllers()
    old = [controller, *target.workers(), *target.vaults()]
    manifests = [info.manifest for info in _checkpoints(target)]
    generation = max((manifest.generation for manifest in manifests if manifest), default=0)
    try:
        target.kill(controller, signal.SIGSTOP)
        target.take_over()
        target.wait(lambda: target.controllers() and target.step(), TIMEOUT_S, "a successor's step")
        lines = len(_journal(target))
    except BaseException:  # nobody fences it: it would train on, beside the next episode
        target.kill(controller)
        raise
    finally:
        target.kill(controller, signal.SIGCONT)
    target.wait(
        lambda: not any(map(target.is_alive, old)), TIMEOUT_S, "the end of the paused controller"
    )
    late = [
        entry
        for entry in _journal(target)[lines:]
        if 0 < int(entry.get("generation", generation + 1)) <= generation
    ]
    if late:
        raise NotHeldError(f"{target.text}: the fenced controller wrote {late[0]}")
    target.mark_fired()


def why_no_second_submission() -> str:
    """Why this machine cannot run a second submission, which mounts a file for its processes."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "it needs root and unshare"
    command = ["unshare", "--mount", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.stderr.strip() if done.returncode else ""


def lose_nodes(target: Target, rng: random.Random) -> None:
    """Kills all Ray processes of one node, and of the other one when the first was replaced."""
    raylets = sorted({psutil.Process(pid).ppid() for pid in target.workers()})
    if len(raylets) < 2:
        raise NotHeldError(f"{target.text}: the workers are on {len(raylets)} node")
    rng.shuffle(raylets)
    for raylet in raylets:
        children = psutil.Process(raylet).children(recursive=True)
        for pid in (raylet, *(child.pid for child in children)):  # first, or it says good-bye
            target.kill(pid)
        target.wait(lambda pid=raylet: not target.is_alive(pid), TIMEOUT_S, "the node's end")
        if raylet == raylets[-1]:
            target.mark_fired()
        target.wait_until_repaired()


@contextmanager
def _stopped(pids: list[int]) -> Iterator[list[int]]:
    """The processes do not run inside the `with`."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield pids
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _newest_complete_slots(vaults: list[int]) -> dict[int, list[tuple[Path, SlotHeader]]]:
    """The buffers of the newest step of which the vaults hold all ranks, by rank, with copies on
    other nodes. Empty if there is none."""
    versions: defaultdict[tuple[int, int], dict[int, list[tuple[Path, SlotHeader]]]]
    versions = defaultdict(dict)
    for vault in vaults:
        for path in Path(f"/proc/{vault}/fd").iterdir():
            with suppress(OSError):
                if not os.readlink(path).startswith("/memfd:"):
                    continue
                with path.open("rb") as file:
                    header = read_header(file.fileno())
                if header is not None and header.step > 0:
                    ranks = versions[header.step, header.generation]
                    ranks.setdefault(header.rank, []).append((path, header))
    for _, ranks in sorted(versions.items(), reverse=True):
        if len(ranks) == next(iter(ranks.values()))[0][1].world_size:
            return ranks
    return {}


def _flip(path: Path, header: SlotHeader, rng: random.Random) -> None:
    """Inverts a few bytes of the state, or of its index or metadata."""
    start, nbytes = rng.choice(
        (
            (header.data_offset, header.data_bytes),
            (PAGE_BYTES, header.index_bytes),
            (header.metadata_offset, header.metadata_bytes),
        )
    )
    at = start + rng.randrange(max(1, nbytes - FLIPPED_BYTES))
    with path.open("r+b", buffering=0) as file:
        original = os.pread(file.fileno(), FLIPPED_BYTES, at)
        os.pwrite(file.fileno(), bytes(byte ^ 0xFF for byte in original), at)


def _damage_checkpoint(info: CheckpointInfo, what: str, rng: random.Random) -> None:
    """Damages the length in front of a rank file's header, the header, or the manifest."""
    names = [entry.name for entry in info.entries if entry.name.endswith(".safetensors")]
    path = Path(info.folder, MANIFEST_NAME if what == "manifest" else rng.choice(names))
    raw = bytearray(path.read_bytes())
    if what == "length":
        raw[:8] = rng.randbytes(8)
    else:
        begin = 8 if what == "header" else 0
        end = 8 + int.from_bytes(raw[:8], "little") if what == "header" else len(raw)
        text = raw[begin:end].rstrip()
        at = begin + rng.randrange(len(text))
        raw[at] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def _checkpoints(target: Target) -> list[CheckpointInfo]:
    return list_checkpoints(str(target.job_dir))


def _journal(target: Target) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (target.job_dir / "events.jsonl").read_text().splitlines()]


def _events(target: Target) -> str:
    return (target.control.folder / "events.txt").read_text()


def _log(target: Target, text: str) -> None:
    """Adds what was done to the events of the episode."""
    with (target.control.folder / "events.txt").open("a") as file:
        file.write(f"          {target.text}: {text}\n")
