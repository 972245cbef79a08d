"""Exports of a plain PyTorch model and optimizer, read back with the formats' own libraries."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rayzero.deepspeed.entry import initialize
from rayzero.engine.checkpoint import export
from rayzero.engine.checkpoint.export import export_checkpoint, export_state, write_safetensors
from rayzero.engine.checkpoint.export_model import ExportedModel
from rayzero.engine.checkpoint.imports.tensors import FlatTensor, TensorSource
from rayzero.engine.errors import ConfigError, DataError
from rayzero.engine.layout.reshard import MissingRangesError
from rayzero.engine.precision.dtypes import dtype_name
from tests.engine import zoo
from tests.engine.api.saving import SAMPLES, make_engine
from tests.engine.checkpoint.saving import assert_bit_identical, read_manifest
from tests.engine.zoo import IrregularModel, batches, make_model, two_groups

KINDS = ["safetensors", "torch", "dcp"]


def train(model: IrregularModel, optimizer: torch.optim.Optimizer, data: list[Tensor]) -> None:
    for batch in data:
        optimizer.zero_grad()
        model(batch[:, :-1], batch[:, 1:])["loss"].backward()
        optimizer.step()


def blocks_of(model: nn.Module, low: str = "") -> TensorSource:
    """State of a plain model.

    Args:
        low: the dtype of the model's weights, if those of `model` are main weights.
    """
    names = {param: name for name, param in model.named_parameters()}
    tensors = {f"weights/{name}": param.detach() for name, param in model.named_parameters()}
    tensors |= {f"buffers/{name}": buffer for name, buffer in model.named_buffers()}
    every_name = model.named_parameters(remove_duplicate=False)
    ties = {name: names[param] for name, param in every_name if names[param] != name}
    dtypes = {name: low or dtype_name(param.dtype) for name, param in model.named_parameters()}
    pieces = [FlatTensor.from_tensor(name, tensor) for name, tensor in tensors.items()]
    return TensorSource(pieces, {"step": 3, "ties": ties, "model_dtypes": dtypes})


def test_large_safetensors_export_is_sharded(tmp_path: Path) -> None:
    model = make_model()
    write_safetensors(ExportedModel(blocks_of(model)), tmp_path, shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2
    loaded: dict[str, Tensor] = {}
    for file in files:
        tensors = load_file(tmp_path / file)
        assert {index["weight_map"][name] for name in tensors} == {file}
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 1000 or len(tensors) == 1
        loaded |= tensors
    expected = model.state_dict()
    del expected["head.weight"]
    assert_bit_identical(loaded, expected)
    assert loaded.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded.values())


class CountingModel(ExportedModel):
    """Counts the bytes of tensors that were read and are still in memory."""

    live = peak = 0

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        self.live += tensor.nbytes
        self.peak = max(self.peak, self.live)
        return tensor


def test_sharded_export_holds_one_shard_in_memory(tmp_path: Path, monkeypatch: Any) -> None:
    model = CountingModel(blocks_of(make_model()))

    def save(tensors: dict[str, Tensor], *_: Any) -> None:
        model.live -= sum(tensor.nbytes for tensor in tensors.values())

    monkeypatch.setattr(export, "save_safetensors", save)
    write_safetensors(model, tmp_path, shard_bytes=1000)
    assert model.peak <= 1000


def load_dcp(folder: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    content = {"model": {name: torch.empty_like(value) for name, value in like.items()}}
    dcp.load(content, checkpoint_id=folder, no_dist=True)
    return content["model"]


@pytest.mark.parametrize("low", ["", "BF16"])
@pytest.mark.parametrize("kind", KINDS)
def test_exported_weights_have_the_values_and_dtype_of_the_model(
    kind: str, low: str, tmp_path: Path
) -> None:
    model = make_model()
    (tmp_path / "plain").touch()
    written = export_state(blocks_of(model, low=low), str(tmp_path / "out"), kind)
    expected: dict[str, Tensor] = dict(model.state_dict())
    if low:  # buffers keep their dtype
        expected |= {name: param.bfloat16() for name, param in model.named_parameters()}
        expected["head.weight"] = expected["embed.weight"]
    if kind == "safetensors":
        assert written == [str(tmp_path / "out" / "model.safetensors")]
        assert Path(written[0]).stat().st_mode == (tmp_path / "plain").stat().st_mode
        with safe_open(written[0], framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
        loaded = load_file(written[0])
        del expected["head.weight"]  # tied weights are stored once
    elif kind == "torch":
        loaded = torch.load(written[0], weights_only=True)
        assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    else:
        loaded = load_dcp(tmp_path / "out", expected)
        keys = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
        assert not [key for key in keys if key.startswith("optimizer")]
    assert_bit_identical(loaded, expected)


def test_dcp_export_resumes_training_in_pytorch(tmp_path: Path) -> None:
    engine = make_engine(0)
    data = list(batches(5, SAMPLES))
    zoo.train(engine, data[:3])
    engine.save_checkpoint(tmp_path, "saved")
    export_checkpoint(str(tmp_path / "saved"), str(tmp_path / "out"), "dcp")
    fresh = make_model(torch.float64, seed=1)
    optimizer = torch.optim.AdamW(two_groups(fresh), lr=0.5)
    content = dict(zip(("model", "optimizer"), get_state_dict(fresh, optimizer), strict=True))
    dcp.load(content, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(
        fresh,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    for loaded, saved in zip(optimizer.param_groups, engine.optimizer.param_groups, strict=True):
        for key in ("lr", "weight_decay", "betas", "eps"):
            assert loaded[key] == saved[key]
    train(fresh, optimizer, data[3:])
    _, expected = zoo.train_reference(make_model(torch.float64), zoo.adamw, data)
    for name, value in fresh.state_dict().items():
        assert zoo.relative_error(value, expected[name]) < 1e-9, name


def test_target_must_be_empty(tmp_path: Path) -> None:
    source = blocks_of(nn.Linear(2, 2))
    (tmp_path / "empty").mkdir()
    assert export_state(source, str(tmp_path / "empty"), "torch")
    with pytest.raises(ConfigError, match="already exists"):
        export_state(source, str(tmp_path / "empty"), "torch")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="already exists"):
        export_state(source, str(tmp_path / "file"), "torch")
    with pytest.raises(DataError, match="cannot write"):
        export_state(source, str(tmp_path / "file" / "inside"), "torch")


@pytest.mark.parametrize("kind", KINDS)
def test_full_disk_raises_and_leaves_no_files(kind: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted")
    try:
        with pytest.raises(DataError, match="cannot write"):
            export_state(blocks_of(nn.Linear(300, 300)), str(disk / "out"), kind)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_failed_and_killed_exports_are_cleaned_up(tmp_path: Path) -> None:
    source = blocks_of(nn.Linear(2, 2))
    source.read = _raise_disk_full  # type: ignore[method-assign]
    with pytest.raises(DataError, match="No space left"):
        export_state(source, str(tmp_path / "out"), "safetensors")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "leftover").write_text("")
    (written,) = export_state(blocks_of(nn.Linear(2, 2)), str(tmp_path / "out"), "safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert Path(written).is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_export_of_an_engines_checkpoint(kind: str, tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
    }
    engine = initialize(model=make_model(), config=config)[0]
    zoo.train(engine, batches(2, 4))
    engine.save_checkpoint(tmp_path, "step-2")
    reported: list[int] = []
    target = tmp_path / "out"
    written = export_checkpoint(
        str(tmp_path / "step-2"), str(target), kind, progress=reported.append
    )
    tensors = read_manifest(tmp_path / "step-2").tensors
    read = [name for name in tensors if kind == "dcp" or not name.startswith("optimizer.")]
    assert sum(reported) == sum(tensors[name].numel * tensors[name].item_bytes for name in read)
    expected = engine.state_dict()
    if kind == "safetensors":
        del expected["head.weight"]
        loaded = load_file(written[0])
    else:
        loaded = torch.load(written[0]) if kind == "torch" else load_dcp(target, expected)
    assert_bit_identical(loaded, expected)


def test_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        export_checkpoint(str(tmp_path / "absent"), str(tmp_path / "out"), "torch")
    with pytest.raises(DataError, match="there is no checkpoint at"):
        export_checkpoint(str(tmp_path), str(tmp_path / "out"), "torch")
    with pytest.raises(ConfigError, match="did you mean 'safetensors'"):
        export_state(blocks_of(nn.Linear(2, 2)), str(tmp_path / "out"), "safetensor")


def test_incomplete_state_is_an_error(tmp_path: Path) -> None:
    source = blocks_of(nn.Linear(9, 9))
    source.block_indexes[0] = replace(source.block_indexes[0], ranges=())
    with pytest.raises(MissingRangesError, match=r"weights/weight\["):
        export_state(source, str(tmp_path / "out"), "torch")


def _raise_disk_full(*_: Any) -> None:
    raise OSError(28, "No space left on device")
