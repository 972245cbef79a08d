"""Weights from safetensors files: each rank reads its own, and has the files' values to the bit.
One of two ranks holds half of the weights, and the largest tensor.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import rayzero
from rayzero.engine.api.params import GatheredParameters, Init
from rayzero.engine.errors import DataError
from rayzero.engine.zero.file_values import FileValues
from tests.engine.zoo import Tied
from tests.support.ranks import run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def saved_values(dtype: torch.dtype) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(9)
    state = {name: it for name, it in Tied().state_dict().items() if name != "head.weight"}
    return {
        name: torch.rand(it.shape, generator=draw).to(dtype) if it.is_floating_point() else it + 3
        for name, it in state.items()
    }


def save_in_two(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    values = saved_values(dtype)
    names = list(values)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in parts.items():
        save_file({name: values[name] for name in inside}, folder / file)
    places = {name: file for file, inside in parts.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return values


def build(
    rank: int, world: int, folder: str, stage: int, way: str, precision: dict[str, Any]
) -> tuple[dict[str, Tensor], int, bool]:
    """The model's values after `initialize`, the elements that were read from files, and whether
    another tensor was copied into the model's memory."""
    torch.manual_seed(rank)
    with Init():
        model = Tied()
    if way == "load_pretrained":
        rayzero.load_pretrained(model, folder)
    else:  # transformers' way: rank 0 copies into gathered parameters
        with GatheredParameters(list(model.parameters()), modifier_rank=0):
            if rank == 0:
                report = rayzero.load_pretrained(model, folder)
                assert report.missing == ()
    config = CONFIG | {"zero_optimization": {"stage": stage}} | precision
    count = 0
    read = FileValues.read

    def counted(self: FileValues, start: int, into: Tensor) -> None:
        nonlocal count
        count += into.numel()
        read(self, start, into)

    with mock.patch.object(FileValues, "read", counted):
        engine, *_ = rayzero.initialize(model=model, config=config)
    tied = engine.module.head.weight is engine.module.embed.weight
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.close()
    return state, count, tied


@pytest.mark.parametrize(
    ("stage", "way", "dtype", "precision"),
    [
        (3, "load_pretrained", torch.float32, {}),
        (3, "gathered", torch.bfloat16, {}),
        (3, "load_pretrained", torch.float32, {"bf16": {"enabled": True}}),
        (2, "load_pretrained", torch.bfloat16, {}),
    ],
)
def test_values_are_the_files(
    tmp_path: Path, stage: int, way: str, dtype: torch.dtype, precision: dict[str, Any]
) -> None:
    values = save_in_two(tmp_path, dtype)
    results = run_ranks(2, build, str(tmp_path), stage, way, precision)
    trained = torch.bfloat16 if precision else torch.float32
    params = {name for name, _ in Tied().named_parameters()}
    for name, value in values.items():
        seen = results[0][0][name]
        wanted = value.to(trained) if name in params else value.to(seen.dtype)
        assert torch.equal(seen, wanted), name
    assert all(tied for _, _, tied in results)
    numel = sum(param.numel() for param in Tied().parameters())
    if stage == 3:  # each rank reads its own shards
        assert sum(count for _, count, _ in results) == numel
    else:
        assert [count for _, count, _ in results] == [0, 0]


def test_names_and_shapes_that_differ(tmp_path: Path) -> None:
    values = saved_values(torch.float32)
    del values["norm.bias"]
    save_file({**values, "more": torch.ones(1)}, tmp_path / "model.safetensors")
    model = Tied()
    with pytest.raises(DataError, match=r"lacks 'norm\.bias', and 1 more"):
        rayzero.load_pretrained(model, tmp_path)
    report = rayzero.load_pretrained(model, tmp_path, strict=False)
    assert (report.missing, report.unexpected) == (("norm.bias",), ("more",))
    assert torch.equal(model.embed.weight, values["embed.weight"])
    save_file({"embed.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"shape \(2, 2\)"):
        rayzero.load_pretrained(model, tmp_path, strict=False)
    with pytest.raises(DataError, match="has no weights"):
        rayzero.load_pretrained(model, tmp_path / "absent")


def change_file(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """A rank that does not see the same file: rank 0's values are sent, as they were read."""
    with Init():
        model = Tied()
    rayzero.load_pretrained(model, folder)
    with mock.patch.object(FileValues, "readable", return_value=rank == 0):
        config = CONFIG | {"zero_optimization": {"stage": 3}}
        engine, *_ = rayzero.initialize(model=model, config=config)
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.close()
    return state


def test_a_rank_without_the_file_gets_rank_0s_values(tmp_path: Path) -> None:
    values = save_in_two(tmp_path, torch.float32)
    state = run_ranks(2, change_file, str(tmp_path))[0]
    assert all(torch.equal(state[name], value) for name, value in values.items())


SMAPS = Path("/proc/self/smaps_rollup")
WIDTH, LAYERS = 2048, 4


def make_wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def proportional_set_size() -> int:
    line = next(it for it in SMAPS.read_text().splitlines() if it.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def peak_while_loading(rank: int, world: int, folder: str) -> int:
    """Bytes over what the process had before."""
    # What programs do: glibc then serves large blocks from the heap, and keeps 64 MB of it.
    freed = torch.empty(33_000_000, dtype=torch.uint8)
    del freed
    stop, seen = threading.Event(), [0]
    begin = proportional_set_size()

    def sample() -> None:
        while not stop.wait(0.005):
            seen.append(proportional_set_size() - begin)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        with rayzero.zero_init():
            model = make_wide()
        rayzero.load_pretrained(model, folder)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3},
        }
        engine, *_ = rayzero.initialize(model=model, config=config)
        seen.append(proportional_set_size() - begin)
    finally:
        stop.set()
        sampler.join()
    engine.close()
    return max(seen)


@pytest.mark.skipif(not SMAPS.exists(), reason="proportional set sizes are Linux's")
def test_a_rank_holds_its_half_and_one_tensor(tmp_path: Path) -> None:
    tensor_bytes = WIDTH * WIDTH * 4
    save_file(
        {f"{at}.weight": torch.zeros(WIDTH, WIDTH) for at in range(LAYERS)},
        tmp_path / "model.safetensors",
    )
    peaks = run_ranks(2, peak_while_loading, str(tmp_path))
    half = LAYERS * tensor_bytes // 2
    assert all(0.9 * half < peak <= (half + tensor_bytes) * 1.1 for peak in peaks), peaks
