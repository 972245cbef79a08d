"""Stage: what mirroring every step costs, in percent of a step. Blocks of steps with and without it
alternate; the vault is another process, as in a job."""

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
from benchmarks.mirroring import MirrorSession, no_peer
from rayzero.engine.session import use_session
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.vault import Vault

STAGES = (2, 3)
BLOCKS, SMALL_BLOCKS = 6, 2
STEPS, SMALL_STEPS = 8, 2
WARMUP = 5
GOAL = 0.01  # of a step; the project's goal on GPUs
START_S = 60.0


def run(report: Report, settings: Settings) -> None:
    with _vault_process() as address:
        client = VaultClient(address, 0)
        for number, stage in enumerate(STAGES):
            session = MirrorSession(0, 1, number + 1, client)
            with single_rank_group(store(settings, str(stage))), use_session(session):
                trainee = make_trainee(settings, make_config(stage))
                _compare(report, settings, f"stage {stage}", session, trainee)
                session.mirror.close()
                trainee.engine.close()
            client.announce_complete(number + 2)
            client.release_spares([])
        client.close()


def _compare(
    report: Report, settings: Settings, name: str, session: MirrorSession, trainee: Trainee
) -> None:
    blocks, steps = (SMALL_BLOCKS, SMALL_STEPS) if settings.small else (BLOCKS, STEPS)
    session.enabled = True  # the first mirrors of a generation allocate the slots
    trainee.steps(WARMUP)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for block in range(2 * blocks):
        session.enabled = block % 2 == 1
        session.mirror.settle()
        trainee.steps(
            1
        )  # its copy, where it runs beside training, is a part of the first timed step
        started_s = monotonic()
        for _ in range(steps):
            loss = trainee.step()
        loss.item()
        _synchronize(settings)
        seconds[session.enabled].append((monotonic() - started_s) / steps)
    cost = median(on / off - 1 for on, off in zip(seconds[True], seconds[False], strict=True))
    report.value(f"{name}: step without mirroring_ms", 1e3 * median(seconds[False]))
    report.value(f"{name}: mirroring every step, percent of a step", 100 * cost)
    report.value(f"{name}: training thread in the mirror_ms", 1e3 * median(session.copy_s[WARMUP:]))
    report.value(f"{name}: mirrored_bytes", int(session.mirror.gauges()["replica_bytes"]))
    if settings.on_gpu:
        report.check(f"{name}: cost", cost <= GOAL, f"{cost:.1%}", f"<= {GOAL:.0%}")


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
