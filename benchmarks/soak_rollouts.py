"""The soak test's job with rollouts: its roles, and what must be so at its end."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.soak_control import SoakControl
from benchmarks.soak_job import (
    GROUP,
    LENGTH,
    PROMPTS,
    SAMPLES,
    Points,
    make_model,
    train_reference,
)
from rayzero.engine.data.sample_ledger import read_ledger
from rayzero.engine.data.sampling import SampleOrder
from rayzero.engine.trackers import append_all
from rayzero.orchestrator.job.api import Role
from rayzero.orchestrator.spec import Workers
from rayzero.workers.roles.context import RoleContext

GENERATORS = 2
ROLES = {"rollout": GENERATORS, "score": 1}
"""The workers of each."""
PROMPTS_OF_TASK = 2
HANG_TIMEOUT_S = 4.0
_CPUS = 0.25
_VERSIONS = "versions-{}.jsonl"  # of a process: generation, step and checksum of what it read


def generate(ctx: RoleContext) -> None:
    """Samples of prompts are their numbers. Notes the weights that it has read."""
    control, model = SoakControl.from_environment(), make_model(ctx.seed)
    path = control.folder / _VERSIONS.format(os.getpid())
    before = None
    for task in ctx.tasks(prompts=PROMPTS_OF_TASK):
        if (version := ctx.weights.refresh(model)) != before:
            before = version
            append_all(
                path, (json.dumps([*version, _checksum(model.state_dict())]) + "\n").encode()
            )
        task.done([[(prompt, member) for member in range(GROUP)] for prompt in task.prompts])


def score(ctx: RoleContext) -> None:
    """Makes the samples that are trained on."""
    data = Points()
    for task in ctx.tasks():
        task.done([data[_index(*sample)] for sample in task.samples])


def _index(prompt: int, member: int) -> int:
    """A sample's place among the points."""
    return (prompt * GROUP + member) % LENGTH


def make_roles() -> dict[str, Role]:
    recovery = {"hang_timeout_s": HANG_TIMEOUT_S, "max_faults": 1000, "fault_window_s": 1.0}
    return {
        name: Role(
            f"{__name__}:{function}",
            workers=Workers(min=1, max=ROLES[name], cpus=_CPUS),
            recovery=recovery,
            takes=takes,
        )
        for name, function, takes in (
            ("rollout", "generate", "prompts"),
            ("score", "score", "rollout"),
        )
    }


def check(output_dir: Path, control: SoakControl, steps: int, seed: int) -> list[str]:
    """What was lost: a prompt that was not trained on exactly once; weights at the end, or of a
    version that a generator has read, which are not plain torch's over the ledger."""
    by_step = read_ledger(output_dir / "ledger")
    numbers = sorted(number for step in by_step for number in by_step[step])
    if [*by_step] != [*range(1, steps + 1)] or numbers != [*range(steps * SAMPLES)]:
        return [f"ledger: {len(by_step)} steps, {len({*numbers})} of {len(numbers)} samples once"]
    problems = []
    (*_, expected) = train_reference(_batches([*by_step.values()], seed), seed)
    weights = torch.load(output_dir / "weights.pt", weights_only=True)
    for name, value in expected.items():
        if not torch.allclose(weights[name], value, rtol=1e-9, atol=1e-12):
            problems.append(f"weights: {name} differs from plain torch")
    return problems + _check_versions(output_dir / "ledger", control, seed)


def _check_versions(ledger: Path, control: SoakControl, seed: int) -> list[str]:
    versions: dict[int, dict[int, set[float]]] = defaultdict(lambda: defaultdict(set))
    for path in control.folder.glob(_VERSIONS.format("*")):
        for line in path.read_text().splitlines():
            generation, step, checksum = json.loads(line)
            versions[generation][step].add(checksum)
    problems = [] if versions else ["weights: no generator has read a version"]
    for generation, by_step in versions.items():
        history = _history(ledger, generation, max(by_step))
        states = train_reference(_batches(history, seed), seed)
        checksums = [_checksum(make_model(seed).state_dict()), *map(_checksum, states)]
        problems += [
            f"weights: version {step} of generation {generation} differs from plain torch"
            for step, seen in by_step.items()
            if any(abs(it - checksums[step]) > 1e-9 * abs(checksums[step]) for it in seen)
        ]
    return problems


def _history(ledger: Path, generation: int, steps: int) -> list[list[int]]:
    """The samples' numbers of the steps that a state of this generation is made of."""
    newest: dict[int, dict[int, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    for path in ledger.rglob("generation-*.jsonl"):
        for text in path.read_text().split("\n")[:-1]:
            line: dict[str, Any] = json.loads(text)
            if line["generation"] <= generation:
                newest[line["step"]][line["generation"]][line["rank"]] = line["samples"]
    history = []
    for step in range(1, steps + 1):
        ranks = newest[step][max(newest[step])]
        history.append([number for rank in sorted(ranks) for number in ranks[rank]])
    return history


def _batches(history: list[list[int]], seed: int) -> list[list[int]]:
    """As places among the points."""
    order = SampleOrder(len(PROMPTS), seed)
    return [
        [_index(int(order.indices(it // GROUP, 1)[0]), it % GROUP) for it in numbers]
        for numbers in history
    ]


def _checksum(weights: dict[str, torch.Tensor]) -> float:
    """Depends on every number and on its place."""
    flat = torch.cat([value.flatten() for value in weights.values()])
    return float(flat @ torch.arange(1, len(flat) + 1, dtype=flat.dtype).sqrt())
