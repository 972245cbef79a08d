"""Checkpoints by DeepSpeed's names: saved at one stage and world size, loaded at another."""

from __future__ import annotations

import logging
import random
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import rayzero
from rayzero.engine.checkpoint.errors import CheckpointMismatchError
from rayzero.engine.checkpoint.reader import verify_checkpoint
from rayzero.engine.errors import ConfigError, DataError, EngineError
from rayzero.engine.state.client_state import decode_client_state, encode_client_state
from tests.engine import zoo
from tests.engine.checkpoint import make_deepspeed
from tests.support.ranks import run_ranks

SAMPLES = 12
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_type": "linear"}}


def make_engine(stage: int, model: nn.Module | None = None, **more: Any) -> rayzero.Engine:
    model = zoo.make_model(torch.float64) if model is None else model
    return rayzero.initialize(
        model=model,
        model_parameters=zoo.two_groups(model),
        config={
            "gradient_clipping": 0,
            "train_batch_size": SAMPLES,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 150},
            **more,
        },
    )[0]


def train(engine: rayzero.Engine, steps: range) -> None:
    data = list(zoo.batches(steps.stop, SAMPLES))
    for step in steps:
        part = data[step].chunk(engine.world_size)[engine.rank]
        engine.backward(engine(part[:, :-1], targets=part[:, 1:])["loss"])
        engine.step()


def some(
    rank: int, world: int, stage: int, steps: range, folder: str, more: dict[str, Any]
) -> dict[str, Tensor]:
    engine = make_engine(stage, zoo.make_model(torch.float64, seed=steps.start), **more)
    if steps.start:
        path, state = engine.load_checkpoint(folder)
        assert path == f"{folder}/global_step{steps.start}"
        assert state == {"epoch": steps.start, "of": [0]}
    assert engine.global_steps == steps.start
    assert engine.global_samples == steps.start * SAMPLES
    train(engine, steps)
    client = {"epoch": steps.stop, "of": [rank]}  # rank 0's is kept
    assert engine.save_checkpoint(folder, client_state=client)
    return engine.state_dict()


CHAIN = [(3, 2), (0, 3), (1, 0), (2, 2), (3, 3), (1, 2), (0, 0)]


@pytest.mark.parametrize("more", [{}, {"scheduler": WARMUP}], ids=["constant", "warmup"])
def test_a_chain_of_stages_and_worlds_equals_one_run(more: dict[str, Any], tmp_path: Path) -> None:
    for number, (stage, world) in enumerate(CHAIN):
        steps = range(2 * number, 2 * number + 2)
        state = run_ranks(world, some, stage, steps, str(tmp_path), more)[0]
        assert verify_checkpoint(str(tmp_path / f"global_step{steps.stop}")) == []
    straight = make_engine(0, **more)
    train(straight, range(2 * len(CHAIN)))
    right = straight.state_dict()
    assert max(zoo.relative_error(state[name], right[name]) for name in right) < 1e-9
    if not more:
        plain = zoo.make_model(torch.float64)
        _, right = zoo.train_reference(
            plain,
            lambda groups: torch.optim.AdamW(groups, lr=1e-2),
            list(zoo.batches(2 * len(CHAIN), SAMPLES)),
        )
        assert max(zoo.relative_error(state[name], right[name]) for name in right) < 1e-9


def bf16(rank: int, world: int, stage: int, folder: str) -> None:
    more = {"bf16": {"enabled": True}}
    engine = make_engine(stage, zoo.make_model(), **more)
    train(engine, range(2))
    engine.save_checkpoint(folder, tag="a")
    train(engine, range(2, 4))
    right = engine.state_dict()
    engine.load_checkpoint(folder, "a")  # the living engine itself goes back
    train(engine, range(2, 4))
    other = make_engine(stage, zoo.make_model(seed=9), **more)
    other.load_checkpoint(folder, "a")
    train(other, range(2, 4))
    for one in (engine, other):
        seen = one.state_dict()
        assert all(torch.equal(seen[name], right[name]) for name in right)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_living_engine_goes_back_bit_by_bit(stage: int, tmp_path: Path) -> None:
    run_ranks(2, bf16, stage, str(tmp_path))


def test_what_is_loaded_can_be_chosen(tmp_path: Path) -> None:
    engine = make_engine(0, scheduler=WARMUP)
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    saved = engine.state_dict()

    weights = make_engine(0, zoo.make_model(torch.float64, seed=5), scheduler=WARMUP)
    weights.load_checkpoint(tmp_path, load_module_only=True)
    assert (weights.global_steps, weights.lr_scheduler.last_batch_iteration) == (0, -1)
    assert not weights.optimizer.state
    seen = weights.state_dict()
    assert all(torch.equal(seen[name], saved[name]) for name in saved)

    fresh = make_engine(0, zoo.make_model(torch.float64, seed=5), scheduler=WARMUP)
    fresh.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert (fresh.global_steps, fresh.lr_scheduler.last_batch_iteration) == (3, -1)
    assert not fresh.optimizer.state


def test_the_learning_rate_comes_along_as_with_torch(tmp_path: Path) -> None:
    engine = make_engine(0)
    engine.set_lr(0.125)
    engine.save_checkpoint(tmp_path)
    again = make_engine(0)
    again.load_checkpoint(tmp_path)
    assert again.get_lr() == [0.125, 0.125]


def test_gradients_of_an_unfinished_step_are_forgotten(tmp_path: Path) -> None:
    engine = make_engine(0, gradient_accumulation_steps=2)
    engine.save_checkpoint(tmp_path)
    batch = next(zoo.batches(1, 6))
    engine.backward(engine(batch[:, :-1], targets=batch[:, 1:])["loss"])
    engine.step()
    engine.load_checkpoint(tmp_path)
    assert engine.micro_steps == 0
    for _ in range(2):
        engine.backward(engine(batch[:, :-1], targets=batch[:, 1:])["loss"])
        engine.step()
    right = make_engine(0, gradient_accumulation_steps=2)
    for _ in range(2):
        right.backward(right(batch[:, :-1], targets=batch[:, 1:])["loss"])
        right.step()
    a, b = engine.state_dict(), right.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_frozen_parameters_may_be_left_out(tmp_path: Path) -> None:
    engine = make_engine(0)
    engine.save_checkpoint(tmp_path, tag=1, exclude_frozen_parameters=True)
    engine.save_checkpoint(tmp_path, tag=2)
    small, large = (
        sum(one.stat().st_size for one in (tmp_path / tag).glob("rank-*")) for tag in "12"
    )
    assert small < large
    other = make_engine(0, zoo.make_model(torch.float64, seed=5))
    kept = other.module.blocks[0].frozen.weight.clone()
    other.load_checkpoint(tmp_path, tag=1)
    assert torch.equal(other.module.blocks[0].frozen.weight, kept)
    assert torch.equal(other.module.embed.weight, engine.module.embed.weight)


def test_nothing_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(0)
    with caplog.at_level(logging.WARNING, "rayzero.engine"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "no checkpoint in" in caplog.text
    with pytest.raises(DataError, match="no checkpoint 'best'"):
        engine.load_checkpoint(tmp_path, "best")
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(DataError, match="the file latest there"):
        engine.load_checkpoint(tmp_path)


def test_a_tag_that_is_saved_again_is_the_new_one(tmp_path: Path) -> None:
    engine = make_engine(0)
    engine.save_checkpoint(tmp_path, "best", client_state={"loss": 2.0})
    engine.save_checkpoint(tmp_path, "other", save_latest=False)
    engine.save_checkpoint(tmp_path, "best", client_state={"loss": 1.0})
    assert len(list((tmp_path / "best").iterdir())) == 2
    assert engine.load_checkpoint(tmp_path)[1] == {"loss": 1.0}


@pytest.mark.parametrize("tag", ["", "..", "a/../b", "/a"])
def test_a_tag_is_a_folders_name(tag: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder's name"):
        make_engine(0).save_checkpoint(tmp_path, tag)


def test_another_model(tmp_path: Path) -> None:
    make_engine(0).save_checkpoint(tmp_path)
    other = zoo.make_model(torch.float64)
    other.more = nn.Linear(2, 2).double()
    engine = make_engine(0, other)
    with pytest.raises(CheckpointMismatchError, match="weights/more"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)


def one_rank_fails(rank: int, world: int, folder: str) -> str:
    engine = make_engine(2)
    client = {"bad": object()} if rank == 1 else {}
    with pytest.raises(EngineError) as error:
        engine.save_checkpoint(folder, client_state=client)
    with pytest.raises(ConfigError, match="different tags"):
        engine.save_checkpoint(folder, tag=f"of{rank}")
    with pytest.raises(ConfigError, match="custom_load_fn"):
        engine.load_checkpoint(folder, custom_load_fn=print)
    engine.save_checkpoint(folder)
    (path,) = Path(folder).glob("*/rank-00001-*")
    if rank == 0:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    torch.distributed.barrier()
    with pytest.raises((DataError, EngineError), match="damaged"):
        engine.load_checkpoint(folder)
    return str(error.value)


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, one_rank_fails, str(tmp_path), timeout_s=30)
    assert first.startswith("rank 1 failed: client_state['bad'] is a builtins.object")
    assert second.startswith("client_state['bad'] is a builtins.object")


def whole_model(rank: int, world: int, folder: str, stage: int) -> None:
    engine = make_engine(stage, zoo.make_model(), bf16={"enabled": True})
    assert engine.save_16bit_model(folder, f"{stage}.bin")
    assert engine.save_fp16_model(folder, f"{stage}.safetensors")
    loaded = zoo.make_model(seed=3)
    other = make_engine(stage, loaded, bf16={"enabled": True})
    other.load_module_state_dict(torch.load(f"{folder}/{stage}.bin", weights_only=True))
    a, b = engine.state_dict(), other.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("stage", [0, 3])
def test_whole_models(stage: int, tmp_path: Path) -> None:
    run_ranks(2, whole_model, str(tmp_path), stage)
    right = {name: one.to(torch.bfloat16) for name, one in zoo.make_model().state_dict().items()}
    seen = torch.load(tmp_path / f"{stage}.bin", weights_only=True)
    other = load_file(tmp_path / f"{stage}.safetensors")
    assert seen.keys() == right.keys() == other.keys()
    for name in right:
        assert torch.equal(seen[name], right[name])
        assert torch.equal(other[name], right[name])


@pytest.mark.parametrize("name", ["stage2-fp16", "stage3-fp32"])
def test_what_deepspeed_wrote(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(make_deepspeed.ARCHIVE) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / name
    oracle = load_file(folder / "oracle.safetensors")
    model = make_deepspeed.Model()
    config = {"optimizer": {"type": "AdamW", "params": make_deepspeed.OPTIONS}}
    engine, *_ = rayzero.initialize(
        model=model, model_parameters=make_deepspeed.two_groups(model), config=config
    )
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    assert engine.global_steps == make_deepspeed.STEPS
    for parameter, value in engine.state_dict().items():
        if f"weights/{parameter}" in oracle:
            torch.testing.assert_close(value, oracle[f"weights/{parameter}"].float())


def test_client_state_comes_back_as_it_was() -> None:
    state = {
        "plain": [None, True, 1, 2.5, "é", {"a": {}}],
        "floats": [float("inf"), float("-inf")],
        "tuple": (1, (2, [3])),
        "keys": {1: "a", (2, 3): "b", "__rayzero__": 1},
        "set": {1, 2},
        "bytes": b"\0\xff",
        "args": Namespace(lr=1e-3, path=Path("a/b")),
        "python": random.getstate(),
    }
    assert decode_client_state(encode_client_state(state)) == state
    numbers = np.random.default_rng(0).integers(0, 9, (2, 3))
    tensors = {
        "array": numbers,
        "scalar": np.float32(1.5),
        "half": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "single": torch.tensor(2),
        "rng": torch.get_rng_state(),
    }
    found = decode_client_state(encode_client_state(tensors))
    assert np.array_equal(found["array"], numbers)
    assert found["array"].dtype == numbers.dtype
    assert (found["scalar"], found["scalar"].dtype) == (1.5, np.float32)
    for name in ("half", "empty", "single", "rng"):
        assert torch.equal(found[name], tensors[name])
        assert found[name].dtype is tensors[name].dtype


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"model": nn.Linear(1, 1)}, r"\['model'\] is a torch.nn.modules.linear.Linear"),
        ([1, [lambda: 0]], r"\[1\]\[0\] is a builtins.function"),
        (torch.zeros(2 << 20), "8388608 bytes"),
    ],
)
def test_what_cannot_be_kept_is_named(value: Any, told: str) -> None:
    with pytest.raises(EngineError, match="client_state" + told if told[0] == "\\" else told):
        encode_client_state(value)
