"""DeepSpeed's own files, and safetensors, are read bit by bit."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from rayzero.engine.api.initialize import initialize
from rayzero.engine.checkpoint.imports import open_foreign
from rayzero.engine.checkpoint.imports.deepspeed_files import FlatRange, cut_ranges, rank_range
from rayzero.engine.checkpoint.imports.tensors import TensorSource
from rayzero.engine.checkpoint.imports.weights_only import InertObject, load_weights_only
from rayzero.engine.errors import ConfigError, DataError
from rayzero.engine.state.load import rename_to_model
from tests.engine.checkpoint import make_deepspeed
from tests.engine.checkpoint.tensor_blocks import same, whole_of
from tests.engine.zoo import make_model

NAMES = list(make_deepspeed.CASES)
MATRICES = ["embed.weight", "up.weight", "down.weight"]
ADAMW = {"type": "AdamW", "params": make_deepspeed.OPTIONS}
VECTORS = {"gain", "up.bias", "norm.weight", "norm.bias"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    with zipfile.ZipFile(make_deepspeed.ARCHIVE) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def copied(unpacked: Path, tmp_path: Path) -> Any:
    """A checkpoint's folder that may be damaged."""
    return lambda name: shutil.copytree(unpacked / name, tmp_path / name)


def opened(path: Path) -> TensorSource:
    source = open_foreign(str(path))
    assert source is not None
    return source


def check_deepspeed(folder: Path, name: str) -> None:
    source = opened(folder)
    seen, right = whole_of(source), load_file(folder / "oracle.safetensors")
    model_dtypes = source.metadata(0)["model_dtypes"]
    low = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}.get(name.split("-")[1], "F32")
    assert model_dtypes == dict.fromkeys([*MATRICES, *sorted(VECTORS)], low) | {
        "frozen.weight": low,
        "frozen.bias": low,
    }
    same(seen, right)
    for trained in (*MATRICES, *VECTORS):
        assert seen[f"weights/{trained}"].dtype is torch.float32
    assert seen["optimizer.exp_avg/embed.weight"].abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_weights_and_moments_are_what_deepspeed_says(name: str, unpacked: Path) -> None:
    check_deepspeed(unpacked / name, name)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not importable; the checkpoints in deepspeed.zip are of 0.19.8",
)
@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_as_it_is_installed_writes_the_same_format(name: str, tmp_path: Path) -> None:
    make_deepspeed.make(name, tmp_path)
    check_deepspeed(tmp_path / name, name)


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_steps_groups_schedule_and_ties_are_read(name: str, unpacked: Path) -> None:
    small = opened(unpacked / name).metadata(0)
    world = make_deepspeed.CASES[name].world
    assert small["step"] == make_deepspeed.STEPS
    assert small["sample_cursor"] == make_deepspeed.STEPS * world * make_deepspeed.MICRO_BATCH
    assert small["scheduler"] == {"last_batch_iteration": make_deepspeed.STEPS - 1}
    assert small["ties"] == {"head.weight": "embed.weight"}
    first, second = small["groups"]
    assert first["params"] == MATRICES
    assert set(second["params"]) == VECTORS
    assert first["scalars"] == second["scalars"] == {"step": {"dtype": "F32", "value": 3.0}}
    if "elastic" not in name:  # which keeps no options
        assert (first["options"]["weight_decay"], second["options"]["weight_decay"]) == (0.1, 0.0)
        assert tuple(first["options"]["betas"]) == (0.9, 0.95)


@pytest.mark.parametrize("name", ["stage1-fp32", "stage2-bf16-3-ranks", "stage3-fp32"])
def test_an_engine_trains_on_from_deepspeeds_state(name: str, unpacked: Path) -> None:
    """One step in fp32, against plain torch from the same weights and moments."""
    source = opened(unpacked / name)
    oracle = load_file(unpacked / name / "oracle.safetensors")
    tokens = torch.randint(0, make_deepspeed.VOCAB, (4, 5))

    model = make_deepspeed.Model()
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW, "gradient_clipping": 0}
    groups = make_deepspeed.two_groups(model)
    engine, *_ = initialize(model=model, model_parameters=groups, config=config)
    engine.state.load(source)
    assert engine.progress.step == make_deepspeed.STEPS
    engine.backward(engine(tokens))
    engine.step()

    plain = make_deepspeed.Model()
    optimizer = torch.optim.AdamW(make_deepspeed.two_groups(plain), **make_deepspeed.OPTIONS)
    plain.load_state_dict(plain.state_dict() | _plain_names(oracle, "weights"))
    names = {param: param_name for param_name, param in plain.named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {"step": torch.tensor(float(make_deepspeed.STEPS))} | {
                key: oracle[f"optimizer.{key}/{names[param]}"] for key in ("exp_avg", "exp_avg_sq")
            }
    plain(tokens).backward()
    optimizer.step()
    right = plain.state_dict()
    seen = engine.state_dict()
    assert seen.keys() == right.keys()
    for key, value in right.items():
        torch.testing.assert_close(seen[key], value, rtol=1e-6, atol=1e-7)


def test_deepspeeds_dynamic_loss_scale_is_read(unpacked: Path) -> None:
    """It begins at 2 to the 4th, and nothing overflowed: every step was good."""
    steps = make_deepspeed.STEPS
    small = opened(unpacked / "stage2-fp16").metadata(0)
    assert small["loss_scale"] == {"value": 16.0, "hysteresis": 2, "good_steps": steps}
    assert opened(unpacked / "stage2-bf16-3-ranks").metadata(0)["loss_scale"] is None


def test_the_folder_of_a_step_is_read_like_its_parent(unpacked: Path) -> None:
    same(
        whole_of(opened(unpacked / "stage3-fp32" / "global_step3")),
        whole_of(opened(unpacked / "stage3-fp32")),
    )


def test_fused_optimizers_that_count_in_the_group_are_read(copied: Any) -> None:
    folder = copied("stage1-fp32")
    for path in folder.rglob("*optim_states.pt"):
        content = load_weights_only(path)
        inner = content["optimizer_state_dict"]["base_optimizer_state"]
        for group in inner["param_groups"]:
            group["step"] = 7
        for state in inner["state"].values():
            del state["step"]
        _rewrite(path, content)
    group = opened(folder).metadata(0)["groups"][0]
    assert group["scalars"] == {"step": {"dtype": "F32", "value": 7}}
    assert "step" not in group["options"]


def test_padding_that_a_version_keeps_at_the_end_is_left_out(copied: Any) -> None:
    folder = copied("stage1-fp32")
    right = whole_of(opened(folder))
    path = next(folder.rglob("zero_pp_rank_1_*optim_states.pt"))
    content = load_weights_only(path)
    flats = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flats[0] = torch.cat([flats[0], torch.zeros(2)])
    _rewrite(path, content)
    same(whole_of(opened(folder)), right)


def test_a_rank_that_is_missing_is_named(copied: Any) -> None:
    folder = copied("stage2-bf16-3-ranks")
    next(folder.rglob("bf16_zero_pp_rank_1_*optim_states.pt")).unlink()
    with pytest.raises(DataError, match=r"optim_states\.pt of ranks \[1\], of 3"):
        open_foreign(str(folder))


def test_a_missing_model_file_of_stage_3_is_named(copied: Any) -> None:
    folder = copied("stage3-bf16-3-ranks")
    next(folder.rglob("zero_pp_rank_2_*model_states.pt")).unlink()
    with pytest.raises(DataError, match=r"model_states\.pt of ranks \[2\], of 3"):
        open_foreign(str(folder))


def test_files_of_an_older_save_are_named(copied: Any) -> None:
    folder = copied("stage3-fp32")
    path = next(folder.rglob("zero_pp_rank_1_*optim_states.pt"))
    shutil.copy(path, path.with_name(path.name.replace("rank_1", "rank_2")))
    with pytest.raises(DataError, match=r"of ranks \[2\], but 2 ranks wrote it"):
        open_foreign(str(folder))
    shutil.copy(path, path.with_name("bf16_" + path.name))
    with pytest.raises(DataError, match="are both of rank 1"):
        open_foreign(str(folder))


@pytest.mark.parametrize("cut_at", [0, 100, 5000])
def test_a_cut_file_is_named(cut_at: int, copied: Any) -> None:
    folder = copied("stage1-fp32")
    path = next(folder.rglob("zero_pp_rank_1_*optim_states.pt"))
    os.truncate(path, cut_at)
    with pytest.raises(DataError, match=str(path)):
        open_foreign(str(folder))


def test_latest_that_names_nothing_is_an_error(copied: Any) -> None:
    folder = copied("stage1-fp32")
    (folder / "latest").write_text("global_step9")
    with pytest.raises(DataError, match="names 'global_step9', which is not a folder"):
        open_foreign(str(folder))


def test_partitions_of_another_length_are_refused(copied: Any) -> None:
    folder = copied("stage2-fp16")
    path = next(folder.rglob("zero_pp_rank_0_*optim_states.pt"))
    content = load_weights_only(path)
    flats = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flats[0] = flats[0][:-9]
    _rewrite(path, content)
    with pytest.raises(DataError, match="the partitions hold 261 elements, the parameters need"):
        open_foreign(str(folder))


@pytest.mark.parametrize("key", ["param_shapes", "global_steps", "buffer_names"])
def test_an_unknown_layout_is_an_error_and_no_traceback(key: str, copied: Any) -> None:
    folder = copied("stage1-fp32")
    path = next(folder.rglob("*model_states.pt"))
    content = load_weights_only(path)
    del content[key]
    _rewrite(path, content)
    with pytest.raises(DataError, match=key):
        open_foreign(str(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mp_world_size": 2}, "model-parallel"),
        ({"ds_autoep_layers": [{}]}, "expert-parallel"),
        ({"module": None}, "pipeline-parallel"),
    ],
)
def test_other_parallelism_is_refused(change: dict[str, Any], said: str, copied: Any) -> None:
    folder = copied("stage1-fp32")
    path = next(folder.rglob("*model_states.pt"))
    _rewrite(path, load_weights_only(path) | change)
    with pytest.raises(ConfigError, match=said):
        open_foreign(str(folder))


def test_a_save_without_zero_is_refused(copied: Any) -> None:
    folder = copied("stage1-fp32")
    for path in folder.rglob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(ConfigError, match="saved without ZeRO"):
        open_foreign(str(folder))


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self._command = f"touch {witness}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def test_nothing_is_unpickled(copied: Any, tmp_path: Path) -> None:
    folder, witness = copied("stage1-fp32"), tmp_path / "witness"
    path = next(folder.rglob("*model_states.pt"))
    _rewrite(path, load_weights_only(path) | {"client": Evil(witness)})
    with pytest.raises(ConfigError, match=r"posix\.system, which would run code to load"):
        open_foreign(str(folder))
    path.write_bytes(pickle.dumps(Evil(witness)))
    with pytest.raises(DataError, match="cannot be read"):
        open_foreign(str(folder))
    assert not witness.exists()


def test_deepspeeds_own_objects_become_inert(unpacked: Path) -> None:
    path = next((unpacked / "stage2-fp16").rglob("zero_pp_rank_0_*optim_states.pt"))
    state = load_weights_only(path)["optimizer_state_dict"]
    scaler = state["loss_scaler"]
    assert type(scaler) is InertObject
    assert (scaler.fields["cur_scale"], scaler.fields["dynamic"]) == (16, True)
    assert state["zero_stage"] == 2
    assert type(state["zero_stage"]) is int


def test_a_missing_path_is_an_error_and_other_folders_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_foreign(str(tmp_path / "absent"))
    assert open_foreign(str(tmp_path)) is None
    (tmp_path / "notes.txt").write_text("hello")
    assert open_foreign(str(tmp_path / "notes.txt")) is None
    assert open_foreign("s3://bucket/run") is None


# safetensors


def test_a_safetensors_file_is_weights_only(tmp_path: Path) -> None:
    right = {"a": torch.randn(3, 2), "b": torch.randn(4).bfloat16(), "c": torch.tensor(5)}
    save_file(right, tmp_path / "some.safetensors")
    source = opened(tmp_path / "some.safetensors")
    same(whole_of(source), {f"weights/{name}": one for name, one in right.items()})
    assert source.step == 0


def test_an_indexed_folder_is_one_state(tmp_path: Path) -> None:
    first, second = {"a": torch.randn(3)}, {"b": torch.randn(2), "unlisted": torch.randn(1)}
    save_file(first, tmp_path / "x-1.safetensors")
    save_file(second, tmp_path / "x-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}')
    right = {"weights/a": first["a"], "weights/b": second["b"]}
    same(whole_of(opened(tmp_path)), right)
    for text, said in [
        ('{"weight_map": {"a": "x-3.safetensors"}}', "names 'x-3.safetensors'"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "names '../x.safetensors'"),
        ('{"weight_map": {"z": "x-1.safetensors"}}', "lacks 'z'"),
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
    ]:
        index.write_text(text)
        with pytest.raises(DataError, match=said):
            open_foreign(str(tmp_path))


def test_a_damaged_safetensors_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(30)}, path)
    os.truncate(path, 90)
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read"):
        open_foreign(str(tmp_path))


def test_ties_and_buffers_follow_from_the_model(tmp_path: Path) -> None:
    model = make_model()
    save_model(model, str(tmp_path / "model.safetensors"))
    source = opened(tmp_path)
    rename_to_model(source, model)
    right = {f"weights/{name}": one.detach() for name, one in model.named_parameters()}
    right |= {f"buffers/{name}": one for name, one in model.named_buffers()}
    same(whole_of(source), right)


def test_an_engine_starts_with_the_weights_and_a_new_optimizer(tmp_path: Path) -> None:
    right = make_model(seed=3)
    save_model(right, str(tmp_path / "model.safetensors"))
    source = opened(tmp_path)
    model = make_model(seed=4)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW}
    engine, *_ = initialize(model=model, config=config)
    rename_to_model(source, model)
    engine.state.load(source)
    same(engine.state_dict(), right.state_dict())
    assert engine.progress.step == 0


def test_a_tied_parameter_may_go_by_any_or_all_of_its_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("passing", torch.ones(2), persistent=False)
    value = model[0].weight.detach()
    for names in (["1.weight"], ["0.weight", "1.weight"]):
        tensors = {name: value.clone() for name in names} | {"passing": torch.ones(2)}
        save_file(tensors, tmp_path / "model.safetensors")
        source = opened(tmp_path)
        rename_to_model(source, model)
        same(whole_of(source), {"weights/0.weight": value})


# the layout


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 9))
def test_stages_1_and_2_hold_every_element_once(numels: list[int], world: int, slack: int) -> None:
    flat = torch.arange(sum(numels) + slack)
    stretches = [FlatRange(str(index), 0, numel, numel) for index, numel in enumerate(numels)]
    parts = flat.tensor_split(world)
    found: dict[str, list[int]] = {one.name: [] for one in stretches}
    for part, ranges in zip(
        parts, cut_ranges(stretches, [len(p) for p in parts], slack), strict=True
    ):
        for one in ranges:
            assert len(found[one.name]) == one.start
            found[one.name] += part[one.offset : one.offset + one.stop - one.start].tolist()
    assert [len(found[one.name]) for one in stretches] == numels
    assert sum(found.values(), []) == list(range(sum(numels)))  # noqa: RUF017  short lists


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 5))
def test_stage_3_holds_every_element_once(numels: list[int], world: int) -> None:
    covered = [0] * len(numels)
    for rank in range(world):
        stretches = [
            rank_range(str(index), numel, rank, world) for index, numel in enumerate(numels)
        ]
        lengths = [one.length for one in stretches]
        for index, ranges in enumerate(cut_ranges(stretches, [sum(lengths[:2]), *lengths[2:]])):
            for one in ranges:
                assert one.start == covered[int(one.name)]
                covered[int(one.name)] = one.stop
                first = 0 if index else int(one.name)
                assert one.offset == (lengths[0] if first == 1 else 0)
    assert covered == numels


def _plain_names(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    found = {
        name.removeprefix(f"{kind}/"): one
        for name, one in tensors.items()
        if name.startswith(f"{kind}/")
    }
    return found | {"head.weight": found["embed.weight"]}


def _rewrite(path: Path, content: dict[str, Any]) -> None:
    """Saves what was read: its tensors may be views of the very file that is written."""
    for key in ("loss_scaler", "param_slice_mappings"):  # inert, and not DeepSpeed's any more
        content.get("optimizer_state_dict", {}).pop(key, None)
    partial = path.with_suffix(".new")
    torch.save(content, partial)
    partial.rename(path)
