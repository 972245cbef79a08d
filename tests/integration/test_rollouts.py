"""A job on rollouts, on a real Ray cluster: generators, rewards, ranks, the buffer and the job's
process are lost, and each prompt is trained on exactly once. One of the generators has its weights
in a vLLM."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.data.sample_ledger import read_ledger
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import Reattached, Repaired, RoleWorkerReady
from rayzero.orchestrator.progress import StepRecord
from rayzero.vllm.vault_weights import LLMClient, VaultWeights
from tests.orchestrator.support import EventLog
from tests.vllm import stand_in
from tests.vllm.support import with_plugin
from tests.workers.recovery_jobs import SAMPLES, engine_config, make_model
from tests.workers.rollouts.jobs import GROUP, PROMPTS, make_sample, plain_torch

pytestmark = pytest.mark.slow
STEPS = 30


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def train(ctx: rayzero.Context) -> dict[str, Any]:
    """Waits after a step while the file `hold` exists."""
    engine, *_ = ctx.initialize(model=make_model(torch.float64))
    for x, y in ctx.rollouts(PROMPTS, engine).until(ctx.steps):
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        while (ctx.output_dir / "hold").exists():
            time.sleep(0.02)
    weights = engine.state_dict()
    if ctx.is_main:
        torch.save(weights, ctx.output_dir / "weights.pt")
    return {"pid": os.getpid()}


class Served(nn.Module):
    """What vLLM would have of the trainer's model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model(torch.float64)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.net.named_parameters())
        self.reloading.extend((own[name].data, value) for name, value in weights)


def generate(ctx: rayzero.RoleContext) -> None:
    """Worker 1 has its weights in a vLLM."""
    with with_plugin():
        model = stand_in.LLM.made = Served()
        llm = stand_in.LLM("served", stand_in.WeightTransferConfig("rayzero"))
        served, kind = VaultWeights(ctx.weights, LLMClient(llm)), "vllm" if ctx.number else "own"
        for task in ctx.tasks(prompts=2):
            version = served.refresh() if ctx.number else ctx.weights.refresh(model.net)
            assert llm.weight_version == (str(version.step) if ctx.number else None)
            total = sum(parameter.sum().item() for parameter in model.parameters())
            print(f"{kind} version {version.step} {total!r}")
            task.done([[(prompt, member) for member in range(GROUP)] for prompt in task.prompts])


def score(ctx: rayzero.RoleContext) -> None:
    for task in ctx.tasks():
        task.done([make_sample(*sample) for sample in task.samples])


def lose_process(handle: JobHandle, with_worker: int) -> None:
    """The job's process is killed, and a worker before Ray has restarted that."""
    process = handle._running_process()
    pid = ray.get(process.actor.__ray_call__.remote(lambda actor: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    os.kill(with_worker, signal.SIGKILL)


def test_each_prompt_is_trained_on_once(no_leaks: None, tmp_path: Path):
    log = EventLog()
    few = rayzero.Workers(min=1, cpus=0.25)
    handle = rayzero.Job(
        "rollouts",
        train,
        engine=engine_config(1),
        workers=rayzero.Workers(min=2, cpus=0.25),
        steps=STEPS,
        rollouts=rayzero.Rollouts(group=GROUP),
        roles={
            "score": rayzero.Role(score, workers=few, takes="rollout"),
            "rollout": rayzero.Role(
                generate, workers=rayzero.Workers(min=2, cpus=0.25), takes="prompts"
            ),
        },
        checkpoint={"path": str(tmp_path)},
        ledger=True,
        faults=["kill(rank=1, step=12)", "kill_vault(node=0, step=20)"],
    ).submit(observer=log)
    wait_for(lambda: len(log.of(StepRecord)) > 2)
    hold = tmp_path / "rollouts" / "hold"
    hold.touch()
    for event in log.of(RoleWorkerReady)[:2]:
        os.kill(event.worker.pid, signal.SIGKILL)
    wait_for(lambda: len(log.of(RoleWorkerReady)) == 5)  # both were started again
    lose_process(handle, with_worker=log.of(RoleWorkerReady)[-1].worker.pid)
    wait_for(lambda: len(log.of(RoleWorkerReady)) == 6)
    (again,) = log.of(Reattached)
    others = {"score": 1, "rollout": 2}
    others[log.of(RoleWorkerReady)[4].role] -= 1
    assert (again.generation, again.lost_ranks, again.roles) == (1, (), others)
    assert log.of(RoleWorkerReady)[5].role == log.of(RoleWorkerReady)[4].role
    hold.unlink()
    result = handle.result()
    assert [it.cause for it in log.of(Repaired)] == ["lost", "rollouts"]
    assert result.metrics["steps"] == STEPS
    folder = tmp_path / "rollouts"
    steps = read_ledger(folder / "ledger")
    numbers = [number for step in sorted(steps) for number in steps[step]]
    assert sorted(numbers) == [*range(STEPS * SAMPLES)]
    log_of_steps = [steps[it] for it in sorted(steps)]
    lines = [line for line in handle.logs(role="rollout") if "version " in line]
    for kind in ("own", "vllm"):
        assert any(f"{kind} version" in line for line in lines)
    seen = {line.partition("version ")[2] for line in lines}
    assert len(seen) >= STEPS / 2 - 3  # the last lines of what is killed may be lost
    for text in seen:  # each is a version's weights, of one step
        step, total = text.split()
        oracle = plain_torch(log_of_steps[: int(step)], 0)
        expected_total = sum(value.sum().item() for value in oracle.values())
        assert float(total) == pytest.approx(expected_total, rel=1e-9)
    curves = json.loads((folder / "history.json").read_text())["curves"]
    assert max(row[3] if len(row) > 2 else row[1] for row in curves["rollouts/lag"]) <= 1
    for name in ("task_wait_s", "weights_wait_s"):
        assert sum(row[1] for row in curves[f"roles/rollout/{name}"]) > 0
    weights = torch.load(folder / "weights.pt", weights_only=True)
    for name, expected in plain_torch(log_of_steps, 0).items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-9, atol=1e-12)
