"""The engine's config: keys, values as real files spell them, invalid ones, and batch sizes."""

from __future__ import annotations

import json
import sys
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.config import EngineConfig, parse_config, read_config
from rayzero.engine.config.normalize import get_path
from rayzero.engine.data.batch_sizes import BatchSizes, resolve_batch_sizes
from rayzero.engine.errors import ConfigError

WHOLE = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 500, "overlap_comm": False},
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "rayzero": {"unshard_modules": ["Block"], "gather_buffers": 3},
}


def test_every_key() -> None:
    config = parse_config(WHOLE)
    result = config.model_dump(mode="json", exclude_unset=True)
    assert result == WHOLE


def test_defaults() -> None:
    config = parse_config(None)
    assert config == parse_config({}) == EngineConfig()
    assert config.zero_optimization.stage == 0
    assert config.zero_optimization.overlap_comm
    assert not config.bf16.enabled
    assert config.gradient_clipping == 1  # DeepSpeed 0.19's
    assert config.optimizer is config.scheduler is config.train_batch_size is None


def test_parsed_config_is_returned_unchanged() -> None:
    config = parse_config(WHOLE)
    assert parse_config(config) is config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("train_batch_size", 0, r"train_batch_size: .*greater than 0 \(seen: 0\)"),
        ("train_batch_size", "8x", r"valid integer \(seen: '8x'\)"),
        ("gradient_accumulation_steps", -1, "gradient_accumulation_steps: .*greater than 0"),
        ("train_micro_batch_size_per_gpu", [], "train_micro_batch_size_per_gpu: "),
        ("steps_per_print", 0, "steps_per_print: .*greater than 0"),
        ("gradient_clipping", -1, "gradient_clipping: .*greater than or equal to 0"),
        ("gradient_clipping", float("inf"), "gradient_clipping: .*finite"),
        ("gradient_clipping", "one", "gradient_clipping: .*valid number"),
        ("zero_optimization.stage", 4, r"zero_optimization\.stage: .*0, 1, 2 or 3 \(seen: 4\)"),
        ("zero_optimization.stage", True, r"zero_optimization\.stage: a number was expected"),
        ("zero_optimization.reduce_bucket_size", 0, r"reduce_bucket_size: .*greater than 0"),
        ("zero_optimization.overlap_comm", 7, r"overlap_comm: .*boolean"),
        ("zero_optimization", 2, r"zero_optimization: .*\(seen: 2\)"),
        ("bf16.enabled", "perhaps", r"bf16\.enabled: .*boolean"),
        (
            "optimizer.type",
            "Adm",
            r"optimizer\.type: .*did you mean 'Adam'.*Adam, AdamW, SGD.*\(seen: 'Adm'\)",
        ),
        ("optimizer", {}, r"optimizer\.type: this key is required"),
        ("optimizer.params", [1], r"optimizer\.params: keys and values were expected"),
        ("scheduler.type", "Twice", r"scheduler\.type: .*\(seen: 'Twice'\)"),
        ("rayzero.zebra", 2, r"rayzero\.zebra: unknown key; known keys: .*gather_buffers, .*"),
        ("rayzero.gather_buffers", 1, r"rayzero\.gather_buffers: .*greater than or equal to 2"),
        ("rayzero.unshard_modules", "Block", r"rayzero\.unshard_modules: .*\(seen: 'Block'\)"),
    ],
)
def test_invalid_value_error_names_the_path(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(_with(path, value))


def _with(path: str, value: Any) -> dict[str, Any]:
    """The full config with a changed value."""
    config = json.loads(json.dumps(WHOLE))
    *outer, last = path.split(".")
    node = config
    for key in outer:
        node = node[key]
    node[last] = value
    return config


def test_all_errors_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"train_batch_size": 0, "zero_optimization": {"stge": 1}, "fp61": {}})
    text = str(caught.value)
    assert text.startswith("engine config: 3 mistakes:\n")
    assert all(key in text for key in ("train_batch_size", "zero_optimization.stge", "fp61"))


def test_hjson(tmp_path: Path) -> None:
    path = tmp_path / "config.hjson"
    path.write_text(
        "{\n"
        "  # how much\n"
        '  "train_batch_size": 64, // samples\n'
        "  zero_optimization: {\n"
        "    /* sharded */ stage: 2,\n"
        "  },\n"
        "}\n"
    )
    config = parse_config(str(path))
    assert (config.train_batch_size, config.zero_optimization.stage) == (64, 2)


def test_error_names_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json' cannot be read: No such file"):
        parse_config(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_config(tmp_path)


@pytest.mark.parametrize("source", [3, [1], True, object()])
def test_other_types_are_rejected(source: Any) -> None:
    with pytest.raises(ConfigError, match=type(source).__name__):
        parse_config(source)


SIZES = st.none() | st.integers(1, 40)


@given(SIZES, SIZES, SIZES, st.integers(1, 9))
def test_batch_sizes_are_resolved_or_rejected(
    total: int | None, micro: int | None, steps: int | None, world: int
) -> None:
    config = EngineConfig(
        train_batch_size=total,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
    )
    result, seen = None, ""
    try:
        result = resolve_batch_sizes(config, world)
    except ConfigError as error:
        seen = error.seen
    if result is None:
        assert total is not None  # otherwise no sizes can conflict
        assert str(total) in seen
        assert str(world) in seen
        assert total < world or steps is not None
        if micro is not None and steps is not None and total != micro * steps * world:
            assert str(micro) in seen
            assert str(steps) in seen
        return
    # Configured sizes are used.
    assert total in (None, result.global_batch)
    assert micro in (None, result.micro_batch)
    assert steps in (None, result.micro_steps)
    # Every rank has a sample, and the largest share needs exactly that many micro-batches.
    share = ceil(result.global_batch / world)
    assert result.global_batch >= world
    assert ceil(share / result.micro_batch) == result.micro_steps
    if total is None or None not in (micro, steps):
        assert result.global_batch == result.micro_batch * result.micro_steps * world


@pytest.mark.parametrize(
    ("sizes", "world", "expected"),
    [
        ((None, None, None), 3, (3, 1, 1)),
        ((None, 4, 2), 3, (24, 4, 2)),
        ((24, None, 2), 3, (24, 4, 2)),
        ((24, 4, None), 3, (24, 4, 2)),
        ((7, 1, None), 3, (7, 1, 3)),  # shares of 3, 2 and 2
        ((7, 2, None), 3, (7, 2, 2)),
    ],
)
def test_batch_size_examples(sizes: Any, world: int, expected: tuple[int, int, int]) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    result = resolve_batch_sizes(EngineConfig(**dict(zip(keys, sizes, strict=True))), world)
    assert (result.global_batch, result.micro_batch, result.micro_steps) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((8, 2, None), (8, 2, 3)),  # the micro-batch is a limit: 6 samples in three micro-steps
        ((8, None, None), (8, 6, 1)),  # without a limit the number of micro-steps stays
        ((8, None, 2), (8, 3, 2)),
        ((8, 2, 2), (8, 2, 3)),
        ((None, 2, 2), (8, 2, 3)),
    ],
)
def test_uneven_shares_keep_the_global_batch(sizes: Any, expected: tuple[int, int, int]) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = EngineConfig(**dict(zip(keys, sizes, strict=True)))
    assert resolve_batch_sizes(config, 2, (0.75, 0.25)) == BatchSizes(*expected, (0.75, 0.25))


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ((10, 2, 2), 2, "train_batch_size is 10, but .*gpu 2 x .*steps 2 x world size 2 is 8"),
        ((2, None, None), 3, "train_batch_size 2 is less than the world size 3"),
        ((6, None, 4), 2, "6 on 2 ranks is 3 samples per rank, .* gradient_accumulation_steps 4"),
    ],
)
def test_batch_size_errors_name_the_numbers(sizes: Any, world: int, message: str) -> None:
    total, micro, steps = sizes
    config = EngineConfig(
        train_batch_size=total,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
    )
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_batch_sizes(config, world)
    assert caught.value.fix


BUCKET = "zero_optimization.reduce_bucket_size"


def read(path: str, value: Any) -> Any:
    document: Any = value
    for part in reversed(path.split(".")):
        document = {part: document}
    return get_path(parse_config(document).model_dump(), path)


@pytest.mark.parametrize(
    ("path", "written", "expected"),
    [
        ("train_batch_size", "8", 8),
        ("train_batch_size", " 8 ", 8),
        ("train_batch_size", "8.0", 8),
        ("train_batch_size", 1e3, 1000),
        ("train_batch_size", "1e3", 1000),
        (BUCKET, 5e8, 500_000_000),
        (BUCKET, "5e8", 500_000_000),
        (BUCKET, 15099494.4, 15_099_494),
        (BUCKET, "15099494.4", 15_099_494),
        (BUCKET, float("inf"), sys.maxsize),
        (BUCKET, "Infinity", sys.maxsize),
        ("steps_per_print", float("inf"), sys.maxsize),
        ("gradient_clipping", 1, 1.0),
        ("gradient_clipping", "1e-5", 1e-5),  # as YAML reads it
        ("zero_optimization.stage", "2", 2),
        ("zero_optimization.stage", 2.0, 2),
        ("zero_optimization.overlap_comm", "false", False),
        ("zero_optimization.overlap_comm", 0, False),
        ("zero_optimization.overlap_comm", None, True),
        ("bf16.enabled", "True", True),
    ],
)
def test_values_are_converted(path: str, written: Any, expected: Any) -> None:
    value = read(path, written)
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("train_batch_size", 8.5),
        ("train_batch_size", "inf"),
        ("train_batch_size", float("nan")),
        ("train_batch_size", 10**30),
        ("train_batch_size", 10**400),
        ("train_batch_size", "1" * 5000),
        (BUCKET, 0.5),
        (BUCKET, float("nan")),
        (BUCKET, "nan"),
        (BUCKET, float("-inf")),
        (BUCKET, True),
        ("gradient_clipping", 10**400),
        ("gradient_clipping", "nan"),
        ("zero_optimization.stage", 2.5),
        ("zero_optimization.stage", "True"),
        ("fp16.loss_scale", float("inf")),
        ("zero_optimization.offload_optimizer.ratio", 1.5),
        ("communication_data_type", "int3"),
        ("communication_data_type", 16),
    ],
)
def test_invalid_numbers_are_errors_that_name_the_key(path: str, written: Any) -> None:
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        read(path, written)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"train_batch_size": object()}, "train_batch_size: a object is not allowed in a config"),
        ({"optimizer": {"type": "SGD", "params": {"lr": {1, 2}}}}, r"optimizer\.params\.lr: a set"),
        ({1: 2}, "a key is not text, but a int"),
        ({"zero_optimization": {None: 2}}, "zero_optimization: a key is not text"),
    ],
)
def test_types_outside_json_are_rejected(document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(document)


def test_recursive_config_is_rejected() -> None:
    document: dict[str, Any] = {}
    document["optimizer"] = document
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse_config(document)
