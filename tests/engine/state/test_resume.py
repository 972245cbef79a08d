"""Training that changes stage and world size every few steps equals plain PyTorch.

It resumes from the memory of its ranks and from checkpoints in turn.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.checkpoint.verify import verify_checkpoint
from rayzero.engine.layout.reshard import MissingRangesError
from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.api.saving import SAMPLES, WARMUP, train
from tests.engine.state.blocks import Block, StateSession
from tests.support.ranks import RankError, run_ranks

CLIP, STEPS_EACH = 0.5, 2
OPTIMIZERS = {"adamw": zoo.adamw, "sgd": zoo.sgd}
STAGES_AND_WORLDS = [(3, 3), (1, 2), (2, 0), (0, 3), (3, 2), (2, 3), (3, 0), (1, 3), (0, 2), (2, 2)]


def train_steps(
    rank: int,
    world: int,
    stage: int,
    kind: tuple[torch.dtype, str, dict[str, Any]],
    steps: range,
    source: list[Block] | str | None,
    folder: str,
) -> tuple[Block, dict[str, Tensor]]:
    """Resumes from blocks or from a checkpoint's folder, and saves."""
    dtype, optimizer, more = kind
    model = zoo.make_model(dtype, seed=rank + steps.start)
    with use_session(StateSession(source if isinstance(source, list) else None)):
        engine, *_ = rayzero.initialize(
            model=model,
            model_parameters=zoo.two_groups(model),
            optimizer=OPTIMIZERS[optimizer],
            config={
                "train_batch_size": SAMPLES,
                "gradient_clipping": CLIP,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 150},
            }
            | more,
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


@pytest.mark.parametrize(
    ("dtype", "optimizer", "more", "limit"),
    [
        (torch.float64, "adamw", {}, 1e-9),
        (torch.float32, "sgd", {}, 1e-5),
        (torch.float64, "sgd", {"scheduler": WARMUP}, 1e-9),
    ],
    ids=["fp64-adamw", "fp32-sgd", "fp64-sgd-warmup"],
)
def test_changing_stage_and_world_size_equals_pytorch(
    dtype: torch.dtype, optimizer: str, more: dict[str, Any], limit: float, tmp_path: Path
) -> None:
    kind, folder = (dtype, optimizer, more), str(tmp_path / "resumed")
    source: list[Block] | str | None = None
    for number, (stage, world) in enumerate(STAGES_AND_WORLDS):
        steps = range(number * STEPS_EACH, (number + 1) * STEPS_EACH)
        results = run_ranks(world, train_steps, stage, kind, steps, source, folder)
        blocks = [block for block, _ in results]
        check_each_element_is_saved_once(blocks)
        assert verify_checkpoint(f"{folder}/global_step{steps.stop}") == []
        source = blocks if number % 2 else folder
    steps = range(STEPS_EACH * len(STAGES_AND_WORLDS))
    if more:
        whole = run_ranks(0, train_steps, 0, kind, steps, None, str(tmp_path / "whole"))
        expected = whole[0][1]
    else:
        _, expected = zoo.train_reference(
            zoo.make_model(dtype),
            OPTIMIZERS[optimizer],
            list(zoo.batches(steps.stop, SAMPLES)),
            CLIP,
        )
    for name, value in expected.items():
        assert zoo.relative_error(results[0][1][name], value) < limit, name


def test_incomplete_state_is_rejected(tmp_path: Path) -> None:
    kind, folder = (torch.float32, "sgd", {}), str(tmp_path)
    blocks = [it for it, _ in run_ranks(2, train_steps, 3, kind, range(1), None, folder)]
    index = blocks[1].index
    blocks[1].index = replace(index, ranges=index.ranges[:-3])
    with pytest.raises(RankError, match="no source holds") as caught:
        run_ranks(2, train_steps, 1, kind, range(1, 2), blocks, folder)
    assert MissingRangesError.__name__ in str(caught.value)
