"""The whole chain in one process, without a job: the same training functions, with a generator and
a judge that the trainer calls.

    python -m examples.rlhf.loop

Reads the job files in this folder. The jobs compute the same at `max_version_lag: 0`, to the bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

import rayzero
from examples.rlhf import dpo, grpo, ppo, reward, sft
from examples.rlhf.model import load_scorer
from examples.rlhf.rollout import Batch, Sample, sample_group
from rayzero.engine.data.sampling import SampleOrder

Judge = Callable[[Sequence[Sample]], list[Sample]]


class LocalContext:
    """The part of `ctx` that the training functions need.

    Attributes:
        reported: the metrics of each step.
    """

    def __init__(self, job: dict[str, Any], judge: Judge | None = None) -> None:
        self.args = job["args"]
        self.steps = job["steps"]
        self.seed = job.get("seed", 0)
        self.reported: list[dict[str, float]] = []
        self._config = job["engine"]
        self._group = job.get("rollouts", {}).get("group", 1)
        self._judge = judge

    def initialize(self, **kwargs: Any) -> tuple[Any, ...]:
        return rayzero.initialize(**{"config": self._config, **kwargs})

    def report(self, **metrics: float) -> None:
        self.reported.append(metrics)

    def rollouts(self, prompts: Any, engine: Any, collate_fn: Any) -> LocalRollouts:
        draw = partial(sample_group, engine.module, group=self._group, seed=self.seed)
        order = SampleOrder(len(prompts), self.seed)
        batch = engine.train_batch_size() // self._group

        def make(step: int) -> Batch:
            """The samples of a step, by the weights of all steps before it."""
            numbers = order.indices(step * batch, batch).tolist()
            groups = [self._judge(draw(prompts[number])) for number in numbers]
            made: Batch = collate_fn([sample for group in groups for sample in group])
            return Batch(*(tensor.to(engine.device) for tensor in made))

        return LocalRollouts(engine, make)


class LocalRollouts:
    """Replaces the loader of `ctx.rollouts`."""

    def __init__(self, engine: Any, make: Callable[[int], Batch]) -> None:
        self._engine = engine
        self._make = make

    def until(self, steps: int) -> Iterator[Batch]:
        while self._engine.global_steps < steps:
            yield self._make(self._engine.global_steps)


def read_job(name: str) -> dict[str, Any]:
    """The job file of that name beside this file."""
    job: dict[str, Any] = yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text())
    return job


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        job = read_job(name)
        module = {"sft": sft, "reward": reward, "dpo": dpo, "job": grpo, "ppo": ppo}[name]
        judge: Judge = grpo.check_group
        if name == "ppo":
            judge = partial(ppo.rate_group, load_scorer(job["args"]["critic_model_name_or_path"]))
        ctx = LocalContext(job, judge)
        began_s = time.perf_counter()
        result = module.train(ctx)
        took_s = time.perf_counter() - began_s
        rewards = [it["reward"] for it in ctx.reported]
        print(name, f"{took_s:.1f} s,", f"{ctx.steps} steps:", result, flush=True)
        for first in range(0, len(rewards), 50):
            part = rewards[first : first + 50]
            print(
                f"  reward of steps {first + 1} to {first + len(part)}: {sum(part) / len(part):.3f}"
            )


if __name__ == "__main__":
    main(sys.argv[1:] or ["sft", "reward", "job", "ppo", "dpo"])
