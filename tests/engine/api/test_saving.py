"""DeepSpeed's checkpoint API. `state/test_resume.py` saves at one stage and world size and loads at
another."""

from __future__ import annotations

import logging
import random
import threading
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rayzero.engine.checkpoint import export_model
from rayzero.engine.checkpoint.errors import CheckpointMismatchError
from rayzero.engine.errors import ConfigError, DataError, EngineError
from rayzero.engine.state.client_state import decode_client_state, encode_client_state
from tests.engine import zoo
from tests.engine.api.saving import WARMUP, make_engine, train
from tests.support.ranks import run_ranks


def load_into_trained_engine(rank: int, world: int, stage: int, folder: str) -> None:
    more = {"bf16": {"enabled": True}}
    engine = make_engine(stage, zoo.make_model(), **more)
    train(engine, range(2))
    engine.save_checkpoint(folder, tag="a")
    train(engine, range(2, 4))
    expected = engine.state_dict()
    engine.load_checkpoint(folder, "a")  # into the same engine
    train(engine, range(2, 4))
    other = make_engine(stage, zoo.make_model(seed=9), **more)
    other.load_checkpoint(folder, "a")
    train(other, range(2, 4))
    for loaded in (engine, other):
        assert loaded.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        actual = loaded.state_dict()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_load_into_trained_engine_is_bit_identical(stage: int, tmp_path: Path) -> None:
    run_ranks(2, load_into_trained_engine, stage, str(tmp_path))


def test_partial_loading(tmp_path: Path) -> None:
    engine = make_engine(0, scheduler=WARMUP)
    train(engine, range(3))
    engine.set_lr(0.125)
    engine.save_checkpoint(tmp_path)
    saved = engine.state_dict()

    weights = make_engine(0, zoo.make_model(torch.float64, seed=5), scheduler=WARMUP)
    weights.load_checkpoint(tmp_path, load_module_only=True)
    assert (weights.global_steps, weights.lr_scheduler.last_batch_iteration) == (0, -1)
    assert not weights.optimizer.state
    loaded = weights.state_dict()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)

    fresh = make_engine(0, zoo.make_model(torch.float64, seed=5), scheduler=WARMUP)
    fresh.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert (fresh.global_steps, fresh.lr_scheduler.last_batch_iteration) == (3, -1)
    assert not fresh.optimizer.state
    fresh.load_checkpoint(tmp_path)
    assert fresh.get_lr() == [0.125, 0.125]


def test_load_discards_accumulated_gradients(tmp_path: Path) -> None:
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
    fresh = make_engine(0, gradient_accumulation_steps=2)
    for _ in range(2):
        fresh.backward(fresh(batch[:, :-1], targets=batch[:, 1:])["loss"])
        fresh.step()
    a, b = engine.state_dict(), fresh.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_exclude_frozen_parameters(tmp_path: Path) -> None:
    engine = make_engine(0)
    engine.save_checkpoint(tmp_path, tag=1, exclude_frozen_parameters=True)
    engine.save_checkpoint(tmp_path, tag=2)
    small, large = (
        sum(file.stat().st_size for file in (tmp_path / tag).glob("rank-*")) for tag in "12"
    )
    assert small < large
    assert not (tmp_path / "base").exists(), "too small for a file of their own"
    other = make_engine(0, zoo.make_model(torch.float64, seed=5))
    before = other.module.blocks[0].frozen.weight.clone()
    other.load_checkpoint(tmp_path, tag=1)
    assert torch.equal(other.module.blocks[0].frozen.weight, before)
    assert torch.equal(other.module.embed.weight, engine.module.embed.weight)


def test_missing_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(0)
    with caplog.at_level(logging.WARNING, "rayzero.engine"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "no checkpoint in" in caplog.text
    with pytest.raises(DataError, match="no checkpoint 'best'"):
        engine.load_checkpoint(tmp_path, "best")
    (tmp_path / "latest").write_text("missing")
    with pytest.raises(DataError, match="the file latest there"):
        engine.load_checkpoint(tmp_path)


def test_saving_a_tag_again_replaces_it(tmp_path: Path) -> None:
    engine = make_engine(0)
    engine.save_checkpoint(tmp_path, "best", client_state={"loss": 2.0})
    engine.save_checkpoint(tmp_path, "other", save_latest=False)
    engine.save_checkpoint(tmp_path, "best", client_state={"loss": 1.0})
    assert len(list((tmp_path / "best").iterdir())) == 2
    assert engine.load_checkpoint(tmp_path)[1] == {"loss": 1.0}


def make_other_model() -> nn.Module:
    model = zoo.make_model(torch.float64)
    model.extra = nn.Sequential(*(nn.Linear(2, 2).double() for _ in range(2)))
    del model.blocks[3].norm
    return model


def test_load_into_another_model(tmp_path: Path) -> None:
    make_engine(0).save_checkpoint(tmp_path)
    engine = make_engine(0, make_other_model())
    engine.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
    other = make_other_model()
    other.twice = nn.Linear(zoo.WIDTH, 4).double()
    with pytest.raises(CheckpointMismatchError) as caught:
        make_engine(0, other).load_checkpoint(tmp_path)
    text = str(caught.value)
    assert "4 tensors of the model are not in it: weights/extra.0.weight, " in text
    assert ", ...; 2 of its tensors are not in the model: weights/blocks.3.norm." in text
    assert "weights/twice.weight is [10, 10] in the state and [4, 10] in the model" in text
    assert "embed" not in text


def fail_on_one_rank(rank: int, world: int, folder: str) -> str:
    engine = make_engine(2)
    client = {"bad": object()} if rank == 1 else {}
    with pytest.raises(EngineError) as caught:
        engine.save_checkpoint(folder, client_state=client)
    strict = {"checkpoint": {"tag_validation": "FAIL"}}
    with pytest.raises(ConfigError, match="different tags"):
        make_engine(2, **strict).save_checkpoint(folder, tag=f"rank{rank}")
    engine.save_checkpoint(f"{folder}/tags", tag=f"rank{rank}")  # Warn: rank 0's
    assert str(engine.load_checkpoint(f"{folder}/tags")[0]).endswith("/rank0")
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
    return str(caught.value)


def test_failure_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, fail_on_one_rank, str(tmp_path), timeout_s=30)
    assert first.startswith("rank 1 failed: client_state['bad'] is a builtins.object")
    assert second.startswith("client_state['bad'] is a builtins.object")


def save_16bit_models(rank: int, world: int, folder: str, stage: int) -> None:
    engine = make_engine(stage, zoo.make_model(), bf16={"enabled": True})
    assert engine.save_16bit_model(folder, f"{stage}.bin")
    assert engine.save_fp16_model(folder, f"{stage}.safetensors")
    loaded = zoo.make_model(seed=3)
    other = make_engine(stage, loaded, bf16={"enabled": True})
    other.load_module_state_dict(torch.load(f"{folder}/{stage}.bin", weights_only=True))
    a, b = engine.state_dict(), other.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("stage", [0, 3])
def test_save_16bit_model(stage: int, tmp_path: Path) -> None:
    run_ranks(2, save_16bit_models, str(tmp_path), stage)
    model = zoo.make_model()
    kept = dict(model.named_buffers())  # which keep their dtype
    expected = {
        name: value if name in kept else value.to(torch.bfloat16)
        for name, value in model.state_dict().items()
    }
    pickled = torch.load(tmp_path / f"{stage}.bin", weights_only=True)
    safetensors = load_file(tmp_path / f"{stage}.safetensors")
    assert pickled.keys() == expected.keys() == safetensors.keys()
    for name in expected:
        assert torch.equal(pickled[name], expected[name])
        assert torch.equal(safetensors[name], expected[name])


def test_client_state_round_trip() -> None:
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
    half = torch.arange(6).reshape(2, 3).to(torch.bfloat16)
    decoded = decode_client_state(encode_client_state(half))
    assert decoded.dtype is half.dtype
    assert torch.equal(decoded, half)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"model": nn.Linear(1, 1)}, r"\['model'\] is a torch.nn.modules.linear.Linear"),
        (nested(5000), "100 levels"),
        (torch.zeros(2 << 20), "8388608 bytes"),
    ],
)
def test_unsupported_client_state(value: Any, message: str) -> None:
    with pytest.raises(
        EngineError, match="client_state" + message if message[0] == "\\" else message
    ):
        encode_client_state(value)


def test_several_processes_may_write_one_model_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks that all call `convert_zero_checkpoint_to_fp32_state_dict`: both have written before
    the first renames."""
    both = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(export_model.os, "fsync", lambda descriptor: both.wait())
    tensors = {"weight": torch.arange(4.0)}
    with ThreadPoolExecutor(2) as pool:
        for done in [
            pool.submit(export_model.write_model_file, tensors, tmp_path / "model.safetensors")
            for _ in range(2)
        ]:
            done.result()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], tensors["weight"])
