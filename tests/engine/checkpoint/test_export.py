"""What is exported is what a plain torch model and optimizer had, read by the readers of others."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rayzero.engine.api.initialize import initialize
from rayzero.engine.checkpoint import export as module
from rayzero.engine.checkpoint.export import export_checkpoint, export_state, write_safetensors
from rayzero.engine.checkpoint.export_model import ExportedModel
from rayzero.engine.checkpoint.manifest import make_manifest
from rayzero.engine.checkpoint.writer import commit_checkpoint, write_rank_file
from rayzero.engine.errors import ConfigError, DataError
from rayzero.engine.layout.reshard import MissingRangesError
from rayzero.engine.precision.dtypes import dtype_name
from tests.engine.checkpoint.saving import read_manifest
from tests.engine.checkpoint.tensor_blocks import TensorBlocks, same
from tests.engine.zoo import IrregularModel, batches, make_model, two_groups


def train(model: IrregularModel, optimizer: torch.optim.Optimizer, data: list[Tensor]) -> None:
    for batch in data:
        optimizer.zero_grad()
        model(batch[:, :-1], batch[:, 1:])["loss"].backward()
        optimizer.step()


def trained(model: IrregularModel) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
    train(model, optimizer, list(batches(3, 4)))
    return optimizer


def blocks_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, low: str = ""
) -> TensorBlocks:
    """A plain model and optimizer as rayzero's state; `low` is the dtype of the model's weights
    where the ones given here are main weights."""
    names = {param: name for name, param in model.named_parameters()}
    tensors = {f"weights/{name}": one.detach() for name, one in model.named_parameters()}
    tensors |= {f"buffers/{name}": one for name, one in model.named_buffers()}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups if optimizer else ():
        members = [names[param] for param in group["params"]]
        step = optimizer.state[group["params"][0]]["step"] if optimizer else torch.zeros(())
        options = {key: value for key, value in group.items() if key != "params"}
        scalars = {"step": {"dtype": "F32", "value": step.item()}}
        groups.append({"options": options, "scalars": scalars, "params": members})
        for param, name in zip(group["params"], members, strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer.{key}/{name}"] = optimizer.state[param][key]
    small = {
        "step": 3,
        "groups": groups,
        "ties": {
            name: names[param]
            for name, param in model.named_parameters(remove_duplicate=False)
            if names[param] != name
        },
        "model_dtypes": {
            name: low or dtype_name(one.dtype) for name, one in model.named_parameters()
        },
    }
    return TensorBlocks(tensors, json.loads(json.dumps(small)))


def test_safetensors_are_read_by_the_library_into_the_model(tmp_path: Path) -> None:
    model = make_model()
    trained(model)
    target = tmp_path / "out"
    written = export_state(blocks_of(model), str(target), "safetensors")
    assert written == [str(target / "model.safetensors")]
    (plain := tmp_path / "plain").touch()
    assert Path(written[0]).stat().st_mode == plain.stat().st_mode
    with safe_open(written[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "head.weight" not in file.keys()  # noqa: SIM118  tied: one is stored
    fresh = make_model(seed=1)
    load_model(fresh, written[0], strict=True)
    same(fresh.state_dict(), model.state_dict())


def test_large_models_are_sharded_with_an_index(tmp_path: Path) -> None:
    model = make_model()
    write_safetensors(ExportedModel(blocks_of(model)), tmp_path, shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2
    found: dict[str, Tensor] = {}
    for file in files:
        tensors = load_file(tmp_path / file)
        assert {index["weight_map"][name] for name in tensors} == {file}
        assert sum(one.nbytes for one in tensors.values()) <= 1000 or len(tensors) == 1
        found |= tensors
    right = model.state_dict()
    del right["head.weight"]
    same(found, right)
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in found.values())


class Counting(ExportedModel):
    """Counts the bytes that are alive of what it has read."""

    alive = highest = 0

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        self.alive += tensor.nbytes
        self.highest = max(self.highest, self.alive)
        return tensor


def test_one_shard_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: Any) -> None:
    state = Counting(blocks_of(make_model()))

    def save(tensors: dict[str, Tensor], *_: Any) -> None:
        state.alive -= sum(one.nbytes for one in tensors.values())

    monkeypatch.setattr(module, "save_safetensors", save)
    write_safetensors(state, tmp_path, shard_bytes=1000)
    assert state.highest <= 1000


def test_a_torch_state_dict_loads_strictly(tmp_path: Path) -> None:
    model = make_model()
    trained(model)
    (path,) = export_state(blocks_of(model), str(tmp_path / "out"), "torch")
    state = torch.load(path, weights_only=True)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    fresh = make_model(seed=1)
    fresh.load_state_dict(state, strict=True)
    same(fresh.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_weights_have_the_models_dtype_and_buffers_their_own(kind: str, tmp_path: Path) -> None:
    model = make_model()
    (path,) = export_state(blocks_of(model, low="BF16"), str(tmp_path / "out"), kind)
    seen = load_file(path) if kind == "safetensors" else torch.load(path)
    right = {name: one.detach().to(torch.bfloat16) for name, one in model.named_parameters()}
    if kind == "torch":
        right["head.weight"] = right["embed.weight"]
    same(seen, right | dict(model.named_buffers()))


def test_dcp_loads_into_a_plain_model_and_optimizer_which_train_on(tmp_path: Path) -> None:
    model = make_model()
    optimizer = trained(model)
    export_state(blocks_of(model, optimizer), str(tmp_path / "out"), "dcp")

    fresh = make_model(seed=1)
    other = torch.optim.AdamW(two_groups(fresh), lr=0.5)
    content = dict(zip(("model", "optimizer"), get_state_dict(fresh, other), strict=True))
    dcp.load(content, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(
        fresh,
        other,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    same(fresh.state_dict(), model.state_dict())
    for ours, theirs in zip(other.param_groups, optimizer.param_groups, strict=True):
        for key in ("lr", "weight_decay", "betas", "eps"):
            assert ours[key] == theirs[key]
        for one, right in zip(ours["params"], theirs["params"], strict=True):
            same(other.state[one], optimizer.state[right])
    more = list(batches(2, 4, seed=9))
    train(model, optimizer, more)
    train(fresh, other, more)
    same(fresh.state_dict(), model.state_dict())


def test_dcp_without_an_optimizer_has_the_model_only(tmp_path: Path) -> None:
    model = make_model()
    export_state(blocks_of(model), str(tmp_path / "out"), "dcp")
    fresh = make_model(seed=1)
    content = {"model": fresh.state_dict()}
    dcp.load(content, checkpoint_id=tmp_path / "out", no_dist=True)
    same(content["model"], model.state_dict())
    keys = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert not [key for key in keys if key.startswith("optimizer")]


def test_a_target_that_is_not_empty_is_refused(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_a_full_disk_is_an_error_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a small file system")
    try:
        with pytest.raises(DataError, match="cannot write"):
            export_state(blocks_of(nn.Linear(300, 300)), str(disk / "out"), kind)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_failed_export_leaves_nothing_and_a_killed_one_is_swept(tmp_path: Path) -> None:
    source = blocks_of(nn.Linear(2, 2))
    source.read = _full  # type: ignore[method-assign]
    with pytest.raises(DataError, match="No space left"):
        export_state(source, str(tmp_path / "out"), "safetensors")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "leftover").write_text("")
    (written,) = export_state(blocks_of(nn.Linear(2, 2)), str(tmp_path / "out"), "safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert Path(written).is_file()


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_a_checkpoint_of_an_engine_is_exported(kind: str, tmp_path: Path) -> None:
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
    }
    engine, *_ = initialize(model=model, config=config)
    for batch in batches(2, 4):
        engine.backward(engine(batch[:, :-1], batch[:, 1:])["loss"])
        engine.step()
    folder, target = tmp_path / "step-2", tmp_path / "out"
    packed, small = engine.state.pack(), json.loads(engine.state.metadata())
    data = memoryview(bytearray(packed.index.nbytes))
    packed.copy_to(data, constants=True)
    written = write_rank_file(str(folder), 0, packed.index, small, data, generation=1, world_size=1)
    commit_checkpoint(str(folder), make_manifest("job", 2, 1, [written]))

    right = engine.state_dict()
    reported: list[int] = []
    export_checkpoint(str(folder), str(target), kind, progress=reported.append)
    tensors = read_manifest(str(folder)).tensors
    read = [name for name in tensors if kind == "dcp" or name.startswith(("weights/", "buffers/"))]
    assert sum(reported) == sum(tensors[name].numel * tensors[name].item_bytes for name in read)
    seen: dict[str, Tensor] = {name: torch.empty_like(one) for name, one in right.items()}
    if kind == "safetensors":
        seen = load_file(target / "model.safetensors")
        del right["head.weight"]
    elif kind == "torch":
        seen = torch.load(target / "pytorch_model.pt", weights_only=True)
    else:
        dcp.load({"model": seen}, checkpoint_id=target, no_dist=True)
    same(seen, right)


def test_a_checkpoint_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        export_checkpoint(str(tmp_path / "absent"), str(tmp_path / "out"), "torch")
    with pytest.raises(DataError, match="there is no checkpoint at"):
        export_checkpoint(str(tmp_path), str(tmp_path / "out"), "torch")


def test_unknown_words_are_refused(tmp_path: Path) -> None:
    source = blocks_of(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="did you mean 'safetensors'"):
        export_state(source, str(tmp_path / "out"), "safetensor")


def test_an_incomplete_state_is_refused(tmp_path: Path) -> None:
    source = blocks_of(nn.Linear(9, 9))
    source.block_indexes = source.block_indexes[:-1]
    with pytest.raises(MissingRangesError, match=r"weights/weight\["):
        export_state(source, str(tmp_path / "out"), "torch")


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")
