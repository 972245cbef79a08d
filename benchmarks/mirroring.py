"""Cost of mirroring the state into the vault, in seconds per step.

Two ranks on one node train the model of `step_time`. Blocks of steps with mirroring alternate with
blocks without it, and adjacent blocks are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import rayzero
from benchmarks.step_time import BATCHES, MODEL, Step, describe_run, make_batch
from benchmarks.step_time import Plan as Shape
from benchmarks.systems import ADAMW, CLIP_NORM
from examples.gpt.model import GPT
from rayzero.engine.session import NO_REQUESTS, HostSession, StepRequests, use_session
from rayzero.engine.state.composite import CompositeState
from rayzero.workers.messages import Assignment, MirrorPolicy
from rayzero.workers.mirror import Mirror
from rayzero.workers.training_thread import StopFlag
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.vault import Vault


@dataclass(frozen=True)
class Plan:
    """Configuration of a measurement."""

    stages: list[int]
    blocks: int  # of each kind
    steps: int  # in a block
    ranks: int
    threads: int


class MirrorSession(HostSession):
    """An engine session whose mirroring can be switched on and off."""

    def __init__(self, rank: int, ranks: int, generation: int, client: VaultClient) -> None:
        assignment = Assignment(
            rank=rank,
            local_rank=rank,
            local_world_size=ranks,
            vault="",
            generation=generation,
            world_size=ranks,
            store_host="",
            store_port=0,
        )
        policy = MirrorPolicy(replicas=1, every_steps=1)
        interrupt = StopFlag(sys.exit)
        self.mirror = Mirror(policy, assignment, None, client, lambda message: None, interrupt)
        self.state = CompositeState()
        self.enabled = False
        self.copy_s: list[float] = []
        self._step = 0

    def on_engine_ready(self, engine: rayzero.Engine) -> None:
        self.state.add("", engine.state)

    def step_requests(self) -> StepRequests:
        self.mirror.settle()  # where copies run beside training, the one of the last step
        return NO_REQUESTS

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        self._step += 1
        if self.enabled:
            start_s = perf_counter()
            self.mirror.step_done(self._step, agreed, self.state)
            self.copy_s.append(perf_counter() - start_s)


def rank_main(rank: int, plan: Plan, address: str, folder: str) -> None:
    """Main function of a rank. Rank 0 writes the seconds of each block to `folder`."""
    torch.set_num_threads(plan.threads)
    store = dist.FileStore(f"{folder}/store", plan.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks)
    client = VaultClient(address, rank)
    seconds = {}
    for number, stage in enumerate(plan.stages):
        session = MirrorSession(rank, plan.ranks, number + 1, client)
        seconds[stage] = _run_blocks(plan, session, _make_step(session, stage), rank)
        seconds[stage]["copy"] = session.copy_s[plan.steps :]
        client.announce_complete(number + 2)
        client.release_spares([])
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(seconds))
    dist.barrier()
    client.close()
    dist.destroy_process_group()


def _make_step(session: MirrorSession, stage: int) -> Step:
    torch.manual_seed(0)
    with use_session(session):
        engine, *_ = rayzero.initialize(
            model=GPT(MODEL),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": CLIP_NORM,
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": ADAMW},
            },
        )

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _run_blocks(
    plan: Plan, session: MirrorSession, step: Step, rank: int
) -> dict[str, list[float]]:
    batches = [make_batch(rank, index) for index in range(BATCHES)]
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for block in range(2 * plan.blocks + 2):  # the first of each kind is a warm-up
        session.enabled = block % 2 == 1
        dist.barrier()
        start = perf_counter()
        for number in range(plan.steps):
            step(*batches[number % BATCHES])
        dist.barrier()
        if block >= 2:
            seconds["on" if session.enabled else "off"].append(perf_counter() - start)
    return seconds


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mirroring", description=__doc__)
    parser.add_argument("--stages", default="1,2,3", help="comma-separated ZeRO stages")
    parser.add_argument("--blocks", type=int, default=10, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to this file")
    options = parser.parse_args(arguments)
    stages = [int(stage) for stage in options.stages.split(",")]
    plan = Plan(stages, options.blocks, options.steps, options.ranks, options.threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(plan.threads))
    vault = Vault("mirroring", "node", no_peer)
    try:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_main, args=(plan, vault.address(), folder), nprocs=plan.ranks)
            measured = json.loads(Path(folder, "measured.json").read_text())
    finally:
        vault.close()
    for stage, times in measured.items():
        ratio = median(on / off for on, off in zip(times["on"], times["off"], strict=True))
        off_s, on_s = (median(times[kind]) / plan.steps for kind in ("off", "on"))
        print(
            f"stage {stage}: {off_s:.4f} s per step without, {on_s:.4f} s with mirroring; "
            f"paired ratio {ratio:.3f}; copy on rank 0 {median(times['copy']) * 1e3:.1f} ms"
        )
    if options.json:
        facts = describe_run(Shape([], 0, 0, plan.ranks, plan.threads))
        options.json.write_text(json.dumps(facts | asdict(plan) | {"seconds": measured}, indent=2))
    return 0


def no_peer(*arguments: Any) -> Any:
    """A vault's `fetch` where there is one node."""
    raise RuntimeError("there are no other nodes")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
