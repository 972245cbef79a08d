"""Stage: what mirroring costs: the training thread, a step that is mirrored as every other one, and
a mirror alone. Blocks of steps with and without it alternate; the vault is another process, as in a
job.

One rank holds the state of all: to copy it takes longer than a step, so a job mirrors every few
steps. What must hold is that the training thread is free, and that copies run at the link's rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from time import monotonic

import torch

from benchmarks.gpu.one_rank import Trainee, make_config, make_trainee, single_rank_group, store
from benchmarks.gpu.report import Report, Settings
from benchmarks.gpu.transfers import memfd_tensor, time_copy
from benchmarks.mirroring import MirrorSession, no_peer
from rayzero.engine.device import get_device
from rayzero.engine.session import StepRequests, use_session
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.vault import Vault

STAGES = (2, 3)
BLOCKS, SMALL_BLOCKS = 6, 2
STEPS, SMALL_STEPS = 8, 2
WARMUP = 5
THREAD_GOAL = 0.05  # of a step, in the training thread
RATE_GOAL = 0.8  # of a plain copy's, to the same kind of memory
PLAIN_NBYTES, SMALL_PLAIN_NBYTES = 2 << 30, 1 << 20
START_S = 60.0


class TimedSession(MirrorSession):
    """With `alone`, a mirror is complete before the next step begins.

    Attributes:
        copies_s: from a mirror's start, on an idle device, until its last copy has ended.
        complete_s: until its checksums are there, too, and the vault has it.
    """

    def __init__(self, settings: Settings, generation: int, client: VaultClient) -> None:
        super().__init__(0, 1, generation, client)
        self.alone = False
        self.copies_s: list[float] = []
        self.complete_s: list[float] = []
        self._settings = settings

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        if not self.alone:
            super().on_step_end(metrics, agreed)
            return
        _synchronize(self._settings)
        started_s = monotonic()
        super().on_step_end(metrics, agreed)
        _synchronize(self._settings)
        self.copies_s.append(monotonic() - started_s)
        self.mirror.settle()
        self.complete_s.append(monotonic() - started_s)


def run(report: Report, settings: Settings) -> None:
    plain = _plain_rate(settings)
    report.value("plain copy to registered memory_gb_s", plain / 1e9)
    with _vault_process() as address:
        client = VaultClient(address, 0)
        for number, stage in enumerate(STAGES):
            session = TimedSession(settings, number + 1, client)
            with single_rank_group(store(settings, str(stage))), use_session(session):
                trainee = make_trainee(settings, make_config(stage))
                thread = _compare(report, settings, f"stage {stage}", session, trainee)
                rate = _measure_alone(report, settings, f"stage {stage}", session, trainee)
                session.mirror.close()
                trainee.engine.close()
            if settings.on_gpu:
                text = f"<= {THREAD_GOAL:.0%} of a step"
                passed = thread <= THREAD_GOAL
                report.check(f"stage {stage}: training thread", passed, f"{thread:.1%}", text)
                text = f">= {RATE_GOAL:.0%} of {plain / 1e9:.1f} GB/s"
                passed = rate >= RATE_GOAL * plain
                report.check(f"stage {stage}: copies", passed, f"{rate / 1e9:.1f} GB/s", text)
            client.announce_complete(number + 2)
            client.release_spares([])
        client.close()


def _compare(
    report: Report, settings: Settings, name: str, session: TimedSession, trainee: Trainee
) -> float:
    """The share of a step that the training thread spends in the mirror."""
    blocks, steps = (SMALL_BLOCKS, SMALL_STEPS) if settings.small else (BLOCKS, STEPS)
    session.enabled = True  # the first mirrors of a generation allocate the slots
    trainee.steps(WARMUP)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for block in range(2 * blocks):
        session.enabled = block % 2 == 1
        session.mirror.settle()
        # Its copy, where it runs beside training, is a part of the first timed step.
        trainee.steps(1)
        started_s = monotonic()
        for _ in range(steps):
            loss = trainee.step()
        loss.item()
        _synchronize(settings)
        seconds[session.enabled].append((monotonic() - started_s) / steps)
    cost = median(on / off - 1 for on, off in zip(seconds[True], seconds[False], strict=True))
    thread_s, step_s = median(session.copy_s[WARMUP:]), median(seconds[False])
    report.value(f"{name}: step without mirroring_ms", 1e3 * step_s)
    report.value(f"{name}: step that is mirrored_ms", 1e3 * median(seconds[True]))
    report.value(f"{name}: mirroring every step, percent of a step", 100 * cost)
    report.value(f"{name}: training thread in the mirror_ms", 1e3 * thread_s)
    return thread_s / step_s


def _measure_alone(
    report: Report, settings: Settings, name: str, session: TimedSession, trainee: Trainee
) -> float:
    """Bytes per second of a mirror's copies with nothing beside them."""
    nbytes = trainee.engine.state.pack().index.nbytes
    session.mirror.settle()
    session.enabled = session.alone = True
    trainee.steps(SMALL_STEPS if settings.small else STEPS)
    copies_s, complete_s = median(session.copies_s), median(session.complete_s)
    report.value(f"{name}: mirrored_bytes", nbytes)
    report.value(f"{name}: a mirror's copies_ms", 1e3 * copies_s)
    report.value(f"{name}: a mirror with its checksums_ms", 1e3 * complete_s)
    report.value(f"{name}: a mirror's copies_gb_s", nbytes / copies_s / 1e9)
    return nbytes / copies_s


def _plain_rate(settings: Settings) -> float:
    """Bytes per second of one copy to a vault's kind of memory, registered."""
    nbytes = SMALL_PLAIN_NBYTES if settings.small else PLAIN_NBYTES
    source = torch.zeros(nbytes, dtype=torch.uint8, device=settings.device)
    device = get_device(source.device)
    with memfd_tensor(nbytes) as host:
        host.fill_(1)
        device.register_host(host)
        copy_s = time_copy(settings, lambda: host.copy_(source, non_blocking=True))
        device.unregister_host(host)
    return nbytes / copy_s


@contextmanager
def _vault_process() -> Iterator[str]:
    """A vault in another process; its address."""
    processes = get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=serve_vault, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise TimeoutError(f"the vault did not start within {START_S:g} s")
        yield ours.recv()
    finally:
        ours.close()
        process.join(5.0)
        process.kill()


def serve_vault(connection: Connection) -> None:
    """Until the other end of the connection is closed."""
    vault = Vault("gpu", "node", no_peer)
    try:
        connection.send(vault.address())
        connection.poll(None)
    finally:
        vault.close()


def _synchronize(settings: Settings) -> None:
    if settings.on_gpu:
        torch.cuda.synchronize()
