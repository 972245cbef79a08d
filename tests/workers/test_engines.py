"""Several engines that train in one function, through kills, resizes and drains.

Real processes and a vault, without Ray. The oracle is plain torch, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rayzero
from rayzero.engine.checkpoint.export import export_checkpoint
from rayzero.engine.checkpoint.manifest import make_manifest
from rayzero.engine.checkpoint.writer import commit_checkpoint
from rayzero.engine.errors import DataError
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.messages import Finished, Restored, StepReport
from rayzero.workers.vault.records import Restore
from tests.workers.engine_jobs import (
    SECOND,
    WEIGHTS,
    Oracle,
    config,
    kill_name,
    make_models,
    plain_gan,
    plain_ppo,
)
from tests.workers.event_controller import MOST, SPACING, Event, EventController, Kind
from tests.workers.local_workers import ENDED, LocalWorkers
from tests.workers.support import mirrored_setup

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}
pytestmark = pytest.mark.slow


def run_job(
    folder: Path, function: str, events: Sequence[Event], kills: Sequence[Any] = (), **args: Any
) -> tuple[LocalWorkers, EventController]:
    """A job of three workers; `events` whose fault is one of `kills` replace the killed one."""
    steps = max(event.step for event in events) + SPACING
    gates = [event.step for event in events if not event.faults]
    spec = mirrored_setup(
        folder,
        f"tests.workers.engine_jobs:{function}",
        args={"gates": gates, "kills": [[*kill] for kill in kills]} | args,
        ledger=False,
        steps=steps,
    )
    local = LocalWorkers(spec, MOST)
    try:
        controller = EventController(local, events, None)
        controller.run(240)
        assert controller.wrong == []
    finally:
        local.close()
    fired = {it.fault for it in FaultRecord(folder).read()}
    assert fired == {kill_name(*kill) for kill in kills}, fired
    assert local.told_steps(controller.starts) == [*range(1, steps + 1)]
    return local, controller


def check(local: LocalWorkers, oracle: Oracle) -> None:
    """Losses of each step, and the last weights."""
    steps = local.setup.steps or 0
    told: dict[int, set[tuple[float, float]]] = {}
    for message in (it for messages in local.seen.values() for it in messages):
        if isinstance(message, StepReport):
            losses = message.gauges["loss"], message.gauges[f"{SECOND}/loss"]
            told.setdefault(message.step, set()).add(losses)
    done = [*islice(oracle, steps)]
    for step, (losses, _) in enumerate(done, 1):
        for values in told.get(step, ()):
            assert values == pytest.approx(losses, rel=1e-9), step
    for name, weights in zip(WEIGHTS, done[-1][1], strict=True):
        saved = torch.load(Path(local.setup.output_dir, name), weights_only=True)
        torch.testing.assert_close(saved, weights, **TOLERANCE)


def kill_event(rank: int, step: int, point: int) -> Event:
    return Event(step, "replace", (kill_name(rank, step, point),))


def points(*numbers: int) -> list[tuple[int, int, int]]:
    """A kill of the last rank at each of these points, one after the other."""
    return [(MOST - 1, SPACING * turn, point) for turn, point in enumerate(numbers, 1)]


def ends_of(local: LocalWorkers) -> list[Any]:
    """Of all generations but the last, on the ranks that were not killed."""
    ends = [it for messages in local.seen.values() for it in messages if isinstance(it, ENDED)]
    return [it for it in ends if not isinstance(it, Finished)]


@pytest.mark.parametrize(
    ("stages", "critic_steps", "at"),
    [
        ([0, 1], 1, (1, 5, 8, 12)),
        ([1, 3], 1, (2, 6, 10, 15)),
        ([2, 0], 1, (4, 7, 11, 14)),
        ([3, 2], 3, (9, 10, 19, 27)),
    ],
)
def test_adversaries_are_repaired_in_their_loop(
    tmp_path: Path, stages: list[int], critic_steps: int, at: tuple[int, ...]
) -> None:
    """Killed in each engine's part of a step, and between the two: survivors stay."""
    kills, args = points(*at), {"stages": stages, "critic_steps": critic_steps}
    local, _ = run_job(tmp_path, "gan", [kill_event(*it) for it in kills], kills, **args)
    check(local, plain_gan(critic_steps))
    assert [it.stays for it in ends_of(local)] == [True] * (MOST - 1) * len(kills)


@pytest.mark.parametrize(
    ("stages", "args", "stays"),
    [
        ([3, 1], {}, [True, True, False]),
        ([2, 3], {"reference": 0}, [True, True, False]),
        ([0, 2], {"reference": 3}, [False, False, False]),
        ([1, 0], {"actor_steps": 3}, [True, True, False]),
    ],
)
def test_policy_and_critic_are_repaired(
    tmp_path: Path, stages: list[int], args: dict[str, int], stays: list[bool]
) -> None:
    """Their batches are made by the function: it stays where the policy has not stepped. Not with a
    reference whose weights are sharded, nor if it waits for steps that are lost."""
    kills = points(2, 4, 9)
    events = [kill_event(*it) for it in kills]
    local, _ = run_job(tmp_path, "ppo", events, kills, stages=stages, **args)
    check(local, plain_ppo(args.get("actor_steps", 1)))
    assert [it.stays for it in sorted(ends_of(local), key=lambda it: it.generation)] == [
        it for it in stays for _ in range(MOST - 1)
    ]


@pytest.mark.parametrize(("function", "stages"), [("gan", [1, 2]), ("ppo", [3, 0])])
def test_ranks_come_and_go(tmp_path: Path, function: str, stages: list[int]) -> None:
    """3, 2, 1, 2, 3 ranks, with a kill in a grown job."""
    kinds: list[Kind] = ["shrink", "shrink", "grow", "grow"]
    events = [Event(SPACING * turn, kind) for turn, kind in enumerate(kinds, 1)]
    kill = (1, SPACING * 5, 10)
    local, controller = run_job(
        tmp_path, function, [*events, kill_event(*kill)], [kill], stages=stages
    )
    assert [ranks for ranks, _ in controller.starts][:6] == [3, 2, 1, 2, 3, 3]
    check(local, plain_gan() if function == "gan" else plain_ppo())


def test_checkpoint_is_resumed_at_other_stages_and_exported(tmp_path: Path) -> None:
    """By two ranks of what three have written; each engine alone, too, by its name."""
    folder, steps = str(tmp_path / "step-6"), 6
    local = start(tmp_path / "before", MOST, steps, [1, 2])
    with closing(local):
        local.finish(1, range(MOST))
        files = local.vault.write(folder, local.slots(1, MOST).slots)
        commit_checkpoint(folder, make_manifest("job", steps, 1, files, stage=1))
    done = [*islice(plain_gan(), steps)]
    for engine, weights in zip((None, SECOND), done[-1][1], strict=True):
        export_checkpoint(folder, str(tmp_path / f"out-{engine}"), "safetensors", engine=engine)
        exported = load_file(tmp_path / f"out-{engine}" / "model.safetensors")
        torch.testing.assert_close(exported, weights, **TOLERANCE)
    _, generator = make_models()
    loaded, *_ = rayzero.initialize(model=generator, config=config(2, 3e-3), name=SECOND)
    assert loaded.load_checkpoint(str(tmp_path), "step-6")[0]
    assert loaded.global_steps == steps
    torch.testing.assert_close(loaded.state_dict(), done[-1][1][1], **TOLERANCE)
    with pytest.raises(DataError, match=r"no engine 'other'\n  allowed: .*, second"):
        export_checkpoint(folder, str(tmp_path / "out"), "safetensors", engine="other")
    local = start(tmp_path / "after", 2, 2 * steps, [3, 0])
    with closing(local):
        local.finish(1, range(2), Restore(steps, checkpoint=folder))
    reported = [it.step for it in local.seen[0] if isinstance(it, StepReport)]
    assert reported == [*range(steps + 1, 2 * steps + 1)]
    assert [it.step for it in local.seen[0] if isinstance(it, Restored)] == [steps]
    check(local, plain_gan())


def start(folder: Path, ranks: int, steps: int, stages: list[int]) -> LocalWorkers:
    folder.mkdir()
    args = {"stages": stages, "gates": []}
    function = "tests.workers.engine_jobs:gan"
    return LocalWorkers(
        mirrored_setup(folder, function, args=args, ledger=False, steps=steps), ranks
    )
