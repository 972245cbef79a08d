"""Imports of DeepSpeed checkpoints and safetensors are bit-identical."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from rayzero.deepspeed.entry import initialize
from rayzero.engine.checkpoint.imports import open_foreign
from rayzero.engine.checkpoint.imports.deepspeed_files import (
    FlatRange,
    cut_ranges,
    load_weights_only,
    rank_range,
)
from rayzero.engine.checkpoint.imports.tensors import TensorSource
from rayzero.engine.errors import ConfigError, DataError
from rayzero.engine.state.load import rename_to_model
from tests.engine.checkpoint import make_deepspeed
from tests.engine.checkpoint.saving import assert_bit_identical, read_tensors
from tests.engine.zoo import make_model, two_groups

Damage = Callable[[Path], object]
NAMES = list(make_deepspeed.CASES)
MATRICES = ["embed.weight", "up.weight", "down.weight"]
ADAMW = {"type": "AdamW", "params": make_deepspeed.OPTIONS}
VECTORS = {"gain", "up.bias", "norm.weight", "norm.bias"}


@pytest.fixture
def copy_checkpoint(unpacked: Path, tmp_path: Path) -> Any:
    """Factory of copies of checkpoint folders, which tests may modify."""
    return lambda name: shutil.copytree(unpacked / name, tmp_path / name)


def open_source(path: Path) -> TensorSource:
    source = open_foreign(str(path))
    assert source is not None
    return source


def check_deepspeed(folder: Path, name: str) -> None:
    source = open_source(folder)
    actual, expected = read_tensors(source), load_file(folder / "oracle.safetensors")
    model_dtypes = source.metadata(0)["model_dtypes"]
    low = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}.get(name.split("-")[1], "F32")
    assert model_dtypes == dict.fromkeys([*MATRICES, *sorted(VECTORS)], low) | {
        "frozen.weight": low,
        "frozen.bias": low,
    }
    assert_bit_identical(actual, expected)
    for trainable in (*MATRICES, *VECTORS):
        assert actual[f"weights/{trainable}"].dtype is torch.float32
    assert actual["optimizer.exp_avg/embed.weight"].abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_weights_and_moments(name: str, unpacked: Path) -> None:
    check_deepspeed(unpacked / name, name)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not importable; the checkpoints in deepspeed.zip are of 0.19.8",
)
@pytest.mark.parametrize("name", NAMES)
def test_installed_deepspeed_writes_the_same_format(name: str, tmp_path: Path) -> None:
    make_deepspeed.make(name, tmp_path)
    check_deepspeed(tmp_path / name, name)


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_step_groups_schedule_and_ties(name: str, unpacked: Path) -> None:
    metadata = open_source(unpacked / name).metadata(0)
    world = make_deepspeed.CASES[name].world
    assert metadata["step"] == make_deepspeed.STEPS
    assert metadata["sample_cursor"] == make_deepspeed.STEPS * world * make_deepspeed.MICRO_BATCH
    assert metadata["scheduler"] == {"last_batch_iteration": make_deepspeed.STEPS - 1}
    assert metadata["ties"] == {"head.weight": "embed.weight"}
    first, second = metadata["groups"]
    assert first["params"] == MATRICES
    assert set(second["params"]) == VECTORS
    assert first["scalars"] == second["scalars"] == {"step": {"dtype": "F32", "value": 3.0}}
    if "elastic" not in name:  # elastic checkpoints contain no options
        assert (first["options"]["weight_decay"], second["options"]["weight_decay"]) == (0.1, 0.0)
        assert tuple(first["options"]["betas"]) == (0.9, 0.95)


@pytest.mark.parametrize("name", ["stage1-fp32", "stage2-bf16-3-ranks", "stage3-fp32"])
def test_training_resumes_from_deepspeed_state(name: str, unpacked: Path) -> None:
    """A step in fp32 equals plain PyTorch with the same weights and moments."""
    oracle = load_file(unpacked / name / "oracle.safetensors")
    tokens = torch.randint(0, make_deepspeed.VOCAB, (4, 5))

    model = make_deepspeed.Model()
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW, "gradient_clipping": 0}
    groups = two_groups(model)
    engine, *_ = initialize(model=model, model_parameters=groups, config=config)
    path, _ = engine.load_checkpoint(unpacked / name)
    assert path is not None
    assert engine.global_steps == make_deepspeed.STEPS
    engine.backward(engine(tokens))
    engine.step()

    plain = make_deepspeed.Model()
    optimizer = torch.optim.AdamW(two_groups(plain), **make_deepspeed.OPTIONS)
    plain.load_state_dict(plain.state_dict() | _select_weights(oracle))
    names = {param: param_name for param_name, param in plain.named_parameters()}
    saved = open_source(unpacked / name).metadata(0)["groups"]
    for group, of_group in zip(optimizer.param_groups, saved, strict=True):
        group["lr"] = of_group["options"]["lr"]  # the schedule's
        for param in group["params"]:
            optimizer.state[param] = {"step": torch.tensor(float(make_deepspeed.STEPS))} | {
                key: oracle[f"optimizer.{key}/{names[param]}"] for key in ("exp_avg", "exp_avg_sq")
            }
    plain(tokens).backward()
    optimizer.step()
    expected, actual = plain.state_dict(), engine.state_dict()
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-6, atol=1e-7)


def test_deepspeed_dynamic_loss_scale(unpacked: Path) -> None:
    """The initial scale is 2**4, and no step overflowed."""
    steps = make_deepspeed.STEPS
    metadata = open_source(unpacked / "stage2-fp16").metadata(0)
    assert metadata["loss_scale"] == {"value": 16.0, "hysteresis": 2, "good_steps": steps}
    assert open_source(unpacked / "stage2-bf16-3-ranks").metadata(0)["loss_scale"] is None


def test_plain_client_state_of_deepspeed_is_loaded(copy_checkpoint: Any) -> None:
    """DeepSpeed keeps it among its own entries; tensors in it are left out."""
    folder = copy_checkpoint("stage2-fp16")
    assert open_source(folder).metadata(0)["client_state"] == {}
    client_state = {"epoch": 3, "best": {"loss": 0.25, "at": [1, 2]}, "name": "run"}
    with_entry(**client_state, ema=torch.zeros(3))(folder)
    assert open_source(folder).metadata(0)["client_state"] == client_state


def change_files(pattern: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Changes the content of the files of a kind."""

    def apply(folder: Path) -> None:
        for path in folder.rglob(pattern):
            content = load_weights_only(path)
            change(content)
            _rewrite(path, content)

    return apply


def copy_rank_1(old: str, new: str) -> Damage:
    """A file of another save."""

    def apply(folder: Path) -> None:
        path = next(folder.rglob("zero_pp_rank_1_*optim_states.pt"))
        shutil.copy(path, path.with_name(path.name.replace(old, new)))

    return apply


def remove(pattern: str) -> Damage:
    return lambda folder: [path.unlink() for path in folder.rglob(pattern)]


def truncate(length: int) -> Damage:
    return lambda folder: os.truncate(min(folder.rglob("*rank_1_*optim_states.pt")), length)


def without(key: str) -> Damage:
    return change_files("*model_states.pt", lambda content: content.pop(key))


def with_entry(**entry: Any) -> Damage:
    return change_files("*model_states.pt", lambda content: content.update(entry))


def with_flat(
    change: Callable[[torch.Tensor], torch.Tensor], pattern: str = "*optim_states.pt"
) -> Damage:
    def apply(content: dict[str, Any]) -> None:
        flats = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        flats[0] = change(flats[0])

    return change_files(pattern, apply)


def with_count(count: int) -> Damage:
    return change_files(
        "*optim_states.pt", lambda it: it["optimizer_state_dict"].update(partition_count=count)
    )


def name_absent_folder(folder: Path) -> None:
    (folder / "latest").write_text("global_step9")


S1, S2, S3 = "stage1-fp32", "stage2-fp16", "stage3-fp32"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("stage2-bf16-3-ranks", remove("*_rank_1_*optim_states.pt"), r"optim_.* \[1\], of 3"),
        ("stage3-bf16-3-ranks", remove("*_rank_2_*model_states.pt"), r"model_.* \[2\], of 3"),
        (S3, copy_rank_1("rank_1", "rank_2"), r"of ranks \[2\], but 2 ranks wrote it"),
        (S3, copy_rank_1("zero", "bf16_zero"), "are both of rank 1"),
        (S1, truncate(0), "rank_1_mp_rank_00_optim_states.pt"),
        (S1, truncate(100), "rank_1_mp_rank_00_optim_states.pt"),
        (S1, truncate(5000), "rank_1_mp_rank_00_optim_states.pt"),
        (S1, name_absent_folder, "names 'global_step9', which is not a folder"),
        (S2, with_flat(lambda flat: flat[:-9]), "the partitions hold .*, the parameters need"),
        (S1, without("param_shapes"), "param_shapes"),
        (S1, without("global_steps"), "global_steps"),
        (S1, without("buffer_names"), "buffer_names"),
        # Stated sizes are checked before memory is allocated.
        (S1, with_count(10**9), "lacks the .* of ranks"),
        (S1, with_count(10**30), "an integer of over 64 bits"),
        (S1, with_flat(lambda _: torch.ones(1).expand(2**40)), "in a storage of 4 bytes"),
        # Not supported.
        (S1, with_entry(mp_world_size=2), "model-parallel"),
        (S1, with_entry(ds_autoep_layers=[{}]), "expert-parallel"),
        (S1, with_entry(module=None), "pipeline-parallel"),
        (S1, remove("*optim_states.pt"), "saved without ZeRO"),
    ],
)
def test_damaged_and_unsupported_checkpoints_are_errors(
    name: str, damage: Damage, message: str, copy_checkpoint: Any
) -> None:
    folder = copy_checkpoint(name)
    damage(folder)
    with pytest.raises((ConfigError, DataError), match=message):
        open_foreign(str(folder))


def test_step_count_in_param_group(copy_checkpoint: Any) -> None:
    def move_step(content: dict[str, Any]) -> None:
        inner = content["optimizer_state_dict"]["base_optimizer_state"]
        for group in inner["param_groups"]:
            group["step"] = 7
        for state in inner["state"].values():
            del state["step"]

    folder = copy_checkpoint(S1)
    change_files("*optim_states.pt", move_step)(folder)
    group = open_source(folder).metadata(0)["groups"][0]
    assert group["scalars"] == {"step": {"dtype": "F32", "value": 7}}
    assert "step" not in group["options"]


def test_trailing_padding_is_ignored(copy_checkpoint: Any) -> None:
    folder = copy_checkpoint(S1)
    expected = read_tensors(open_source(folder))
    change = with_flat(lambda flat: torch.cat([flat, torch.zeros(2)]), "*rank_1_*optim_states.pt")
    change(folder)
    assert_bit_identical(read_tensors(open_source(folder)), expected)


class MaliciousObject:
    """Executes a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._command = f"touch {marker}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def test_unpickling_executes_no_code(copy_checkpoint: Any, tmp_path: Path) -> None:
    folder, marker = copy_checkpoint("stage1-fp32"), tmp_path / "marker"
    path = next(folder.rglob("*model_states.pt"))
    with_entry(client=MaliciousObject(marker))(folder)
    with pytest.raises(ConfigError, match=r"posix\.system, which would run code to load"):
        open_foreign(str(folder))
    path.write_bytes(pickle.dumps(MaliciousObject(marker)))
    with pytest.raises(DataError, match="cannot be read"):
        open_foreign(str(folder))
    assert not marker.exists()


def test_open_foreign_of_missing_and_unrelated_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_foreign(str(tmp_path / "absent"))
    assert open_foreign(str(tmp_path)) is None
    (tmp_path / "notes.txt").write_text("hello")
    assert open_foreign(str(tmp_path / "notes.txt")) is None
    assert open_foreign("s3://bucket/run") is None


# safetensors


def test_safetensors_file_contains_only_weights(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.randn(4).bfloat16(), "c": torch.tensor(5)}
    save_file(tensors, tmp_path / "some.safetensors")
    source = open_source(tmp_path / "some.safetensors")
    assert_bit_identical(
        read_tensors(source), {f"weights/{name}": t for name, t in tensors.items()}
    )
    assert source.step == 0


def test_folder_with_index(tmp_path: Path) -> None:
    first, second = {"a": torch.randn(3)}, {"b": torch.randn(2), "unlisted": torch.randn(1)}
    save_file(first, tmp_path / "x-1.safetensors")
    save_file(second, tmp_path / "x-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}')
    expected = {"weights/a": first["a"], "weights/b": second["b"]}
    assert_bit_identical(read_tensors(open_source(tmp_path)), expected)
    for text, message in [
        ('{"weight_map": {"a": "x-3.safetensors"}}', "names 'x-3.safetensors'"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "names '../x.safetensors'"),
        ('{"weight_map": {"z": "x-1.safetensors"}}', "lacks 'z'"),
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
    ]:
        index.write_text(text)
        with pytest.raises(DataError, match=message):
            open_foreign(str(tmp_path))
    index.unlink()
    (tmp_path / "x-1.safetensors").rename(tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", 70)
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read"):
        open_foreign(str(tmp_path))


def test_ties_and_buffers_are_taken_from_the_model(tmp_path: Path) -> None:
    model = make_model()
    save_model(model, str(tmp_path / "model.safetensors"))
    source = open_source(tmp_path)
    rename_to_model(source, model)
    expected = {f"weights/{name}": param.detach() for name, param in model.named_parameters()}
    expected |= {f"buffers/{name}": buffer for name, buffer in model.named_buffers()}
    assert_bit_identical(read_tensors(source), expected)


def test_tied_parameter_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("transient", torch.ones(2), persistent=False)
    value = model[0].weight.detach()
    for names in (["1.weight"], ["0.weight", "1.weight"]):
        tensors = {name: value.clone() for name in names} | {"transient": torch.ones(2)}
        save_file(tensors, tmp_path / "model.safetensors")
        source = open_source(tmp_path)
        rename_to_model(source, model)
        assert_bit_identical(read_tensors(source), {"weights/0.weight": value})


# the layout


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 9))
def test_stages_1_and_2_partition_every_element_once(
    numels: list[int], world: int, slack: int
) -> None:
    flat = torch.arange(sum(numels) + slack)
    flat_ranges = [FlatRange(str(index), 0, numel, numel) for index, numel in enumerate(numels)]
    parts = flat.tensor_split(world)
    elements: dict[str, list[int]] = {item.name: [] for item in flat_ranges}
    for part, ranges in zip(
        parts, cut_ranges(flat_ranges, [len(p) for p in parts], slack), strict=True
    ):
        for item in ranges:
            assert len(elements[item.name]) == item.start
            elements[item.name] += part[item.offset : item.offset + item.stop - item.start].tolist()
    assert [len(elements[item.name]) for item in flat_ranges] == numels
    assert sum(elements.values(), []) == list(range(sum(numels)))  # noqa: RUF017  short lists


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 5))
def test_stage_3_partitions_every_element_once(numels: list[int], world: int) -> None:
    covered = [0] * len(numels)
    for rank in range(world):
        flat_ranges = [
            rank_range(str(index), numel, rank, world) for index, numel in enumerate(numels)
        ]
        lengths = [item.length for item in flat_ranges]
        for index, ranges in enumerate(cut_ranges(flat_ranges, [sum(lengths[:2]), *lengths[2:]])):
            for item in ranges:
                assert item.start == covered[int(item.name)]
                covered[int(item.name)] = item.stop
                first = 0 if index else int(item.name)
                assert item.offset == (lengths[0] if first == 1 else 0)
    assert covered == numels


def _select_weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = {
        name.removeprefix("weights/"): tensor
        for name, tensor in tensors.items()
        if name.startswith("weights/")
    }
    return weights | {"head.weight": weights["embed.weight"]}


def _rewrite(path: Path, content: dict[str, Any]) -> None:
    """Save via a new file: the tensors may be views of the file that is replaced."""
    for key in ("loss_scaler", "param_slice_mappings"):  # loaded as inert objects
        content.get("optimizer_state_dict", {}).pop(key, None)
    partial = path.with_suffix(".new")
    torch.save(content, partial)
    partial.rename(path)
