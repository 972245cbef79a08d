"""Training that changes stage and world size every few steps equals plain PyTorch.

It resumes from the memory of its ranks and from checkpoints in turn.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.checkpoint.verify import verify_checkpoint
from rayzero.engine.config.schedules import LR_CURVES
from rayzero.engine.layout.reshard import MissingRangesError
from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.api.saving import SAMPLES, WARMUP, train
from tests.engine.state.blocks import Block, StateSession
from tests.support.ranks import RankError, run_ranks

CLIP, STEPS_EACH = 0.5, 2
STAGES_AND_WORLDS = [(3, 3), (1, 2), (2, 0), (0, 3), (3, 2), (2, 3), (3, 0), (1, 3), (0, 2), (2, 2)]


def train_steps(
    rank: int,
    world: int,
    stage: int,
    steps: range,
    source: list[Block] | str | None,
    folder: str,
) -> tuple[Block, dict[str, Tensor]]:
    """Resumes from blocks or from a checkpoint's folder, and saves."""
    model = zoo.make_model(torch.float64, seed=rank + steps.start)
    with use_session(StateSession(source if isinstance(source, list) else None)):
        engine, *_ = rayzero.initialize(
            model=model,
            model_parameters=zoo.two_groups(model),
            optimizer=zoo.adamw,
            config={
                "train_batch_size": SAMPLES,
                "gradient_clipping": CLIP,
                "scheduler": WARMUP,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 150},
            },
        )
    if isinstance(source, str):
        path, state = engine.load_checkpoint(source)
        assert path == f"{source}/global_step{steps.start}"
        assert state == {"epoch": steps.start, "rank": [0]}
    assert engine.global_steps == steps.start
    assert engine.global_samples == steps.start * SAMPLES
    train(engine, steps)
    client = {"epoch": steps.stop, "rank": [rank]}  # rank 0's is saved
    assert engine.save_checkpoint(folder, client_state=client)
    return Block.of(engine), engine.state_dict()


def check_each_element_is_saved_once(blocks: list[Block]) -> None:
    saved, numels = Counter[str](), dict[str, int]()
    for block in blocks:
        for part in block.index.ranges:
            saved[part.name] += part.stop - part.start
            numels[part.name] = block.index.tensors[part.name].numel
    assert saved == numels


def scheduled_adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Of plain torch, with the schedule's rates."""
    curve, optimizer = LR_CURVES[WARMUP["type"]](**WARMUP["params"]), zoo.adamw(groups)
    configured, steps = [group["lr"] for group in optimizer.param_groups], count(-1)

    def set_lr(*_: Any) -> None:
        step = next(steps)
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = curve.lr(step, number, configured[number])

    optimizer.register_step_pre_hook(set_lr)
    return optimizer


def test_changing_stage_and_world_size_equals_pytorch(tmp_path: Path) -> None:
    """Other optimizers and dtypes: `optim/test_parity.py`, `test_kinds.py`."""
    folder, source = str(tmp_path), None
    for number, (stage, world) in enumerate(STAGES_AND_WORLDS):
        steps = range(number * STEPS_EACH, (number + 1) * STEPS_EACH)
        results = run_ranks(world, train_steps, stage, steps, source, folder)
        blocks = [block for block, _ in results]
        check_each_element_is_saved_once(blocks)
        assert verify_checkpoint(f"{folder}/global_step{steps.stop}") == []
        source = blocks if number % 2 else folder
    data = list(zoo.batches(steps.stop, SAMPLES))
    _, expected = zoo.train_reference(zoo.make_model(torch.float64), scheduled_adamw, data, CLIP)
    for name, value in expected.items():
        assert zoo.relative_error(results[0][1][name], value) < 1e-9, name


def test_incomplete_state_is_rejected(tmp_path: Path) -> None:
    folder = str(tmp_path)
    blocks = [it for it, _ in run_ranks(2, train_steps, 3, range(1), None, folder)]
    index = blocks[1].index
    blocks[1].index = replace(index, ranges=index.ranges[:-3])
    with pytest.raises(RankError, match="no source holds") as caught:
        run_ranks(2, train_steps, 1, range(1, 2), blocks, folder)
    assert MissingRangesError.__name__ in str(caught.value)
