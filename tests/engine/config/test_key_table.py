"""Every key of DeepSpeed is implemented, a no-op, or refused.

`deepspeed_keys.json` lists the keys of DeepSpeed 0.19.8 with their defaults, taken from its
pydantic models and from the keys that its code reads.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.config import EngineConfig, OptimizerConfig, parse_config
from rayzero.engine.config.keys import REFUSED
from rayzero.engine.config.model import FREE_FORM_SECTIONS, KEYS
from rayzero.engine.config.normalize import OLD_NAMES, get_path
from rayzero.engine.errors import ConfigError
from tests.engine.config.model import leaves

DEEPSPEED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "deepspeed_keys.json").read_text(encoding="utf-8")
)
FIELDS = dict(leaves())
OLD = {name.old for name in OLD_NAMES}
OPAQUE = {path for path, field in FIELDS.items() if field.annotation is Any}
"""Keys whose values are not checked."""
# rayzero's keys, sections, and keys of older DeepSpeed versions.
NOT_DEEPSPEEDS = {"optimizer", "optimizer.torch_adam", "scheduler", "aio.thread_count"} | {
    f"compile.{name}" for name in ("enabled", "backend", "kwargs")
}
NAMED = {*FREE_FORM_SECTIONS, "optimizer.type", "scheduler.type"}
# Defaults that depend on the model, or that may differ without changing results.
OTHER_DEFAULTS = {
    "data_efficiency.data_routing.random_ltd.hidden_state_order",  # required there
    "data_efficiency.data_routing.random_ltd.model_type",
    "data_efficiency.data_routing.random_ltd.random_ltd_layer_id",
    "torch_autocast.dtype",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.leaf_module.classes",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_prefetch_bucket_size",
}


def find_row(path: str) -> str | None:
    """The row of the key, or of an enclosing section whose values are not checked."""
    parts = path.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((key for key in prefixes if key in KEYS and (key == path or key in OPAQUE)), None)


def test_all_deepspeed_keys_are_listed() -> None:
    sections = {
        path.rsplit(".", depth)[0] for path in KEYS for depth in range(1, path.count(".") + 1)
    }
    other_keys = OLD | sections
    assert [path for path in DEEPSPEED if not find_row(path) and path not in other_keys] == []


def test_all_keys_belong_to_deepspeed_or_rayzero() -> None:
    strange = [
        path
        for path in KEYS
        if path not in DEEPSPEED
        and not path.startswith("rayzero.")
        and not any(key.startswith(f"{path}.") for key in DEEPSPEED)
        # keys of a section that DeepSpeed 0.19 does not check, or does not have any more
        and not any(path.startswith(f"{key}.") for key, value in DEEPSPEED.items() if value is None)
    ]
    assert set(strange) <= NOT_DEEPSPEEDS


def test_defaults_equal_deepspeed() -> None:
    config = EngineConfig(optimizer=OptimizerConfig(type="SGD")).model_dump()
    for path in sorted(set(FIELDS) & set(DEEPSPEED) - OTHER_DEFAULTS - NAMED):
        ours = get_path(config, path)
        assert (list(ours) if isinstance(ours, tuple) else ours) == DEEPSPEED[path], path


@pytest.mark.parametrize("path", sorted(path for path in OPAQUE if KEYS[path].status is REFUSED))
def test_refused_keys_are_accepted_if_disabled(path: str) -> None:
    for value in (None, "auto", DEEPSPEED.get(path)):
        parse_config(_at(path, value))
    if KEYS[path].active in ("enabled", "") and path != "sequence_parallel_size":
        with pytest.raises(ConfigError, match=rf"{re.escape(path)}: refused: "):
            parse_config(_at(path, True))
    if KEYS[path].active == "enabled":
        parse_config(_at(path, {"enabled": False, "whatever": {"it": "was"}}))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"amp": {"enabled": True}}, r"amp: refused: .*; use bf16, fp16 or torch_autocast"),
        (
            {"tensor_parallel": {"autotp_size": 2}},
            "tensor_parallel: refused: all ranks are data-parallel",
        ),
        ({"sequence_parallel_size": 4}, "sequence_parallel_size: refused"),
        ({"zero_optimization": {"mics_shard_size": 4}}, "use zero_optimization.zero_hpz_part"),
        ({"compression_training": {"a": {"b": {"enabled": True}}}}, "compression_training: ref"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "use gradient_clipping"),
        (
            {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
            "gradient_allreduce_op: mean at stage 3",
        ),
        ({"aio": {"use_gds": True}}, r"aio\.use_gds: refused"),
        ({"weight_quantization": {"num_bits": 8}}, "weight_quantization: refused"),
    ],
)
def test_refused_keys_name_reason_and_alternative(document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(document)


@pytest.mark.parametrize(
    "document",
    [
        {"tensor_parallel": {"autotp_size": 0, "tp_overlap_comm": True}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"sequence_parallel_size": 1, "managed_gradient_accumulation": True},
        {"gradient_allreduce_op": "Mean", "compile": {"offload_parameters": False}},
        {"zero_optimization": {"mics_shard_size": -1, "zenflow": None, "zeropp_loco_param": {}}},
        {"pipeline": {"stages": "auto", "partition": "best"}, "model_info": {"num_params": 10}},
        {"nebula": {"enabled": False}, "weight_quantization": {"enabled": False}},
        {"compression_training": {"layer_reduction": {"enabled": False, "keep": 5}}},
        {"optimizer": {"type": "SGD", "params": {"max_grad_norm": 0.0}}},
        {"fp16": {"enabled": False, "loss_scale": 128, "fp16_master_weights_and_grads": True}},
        {"zero_optimization": {"offload_param": {"device": "none", "buffer_count": 9}}},
    ],
)
def test_no_op_values_of_refused_keys_are_accepted(document: Any) -> None:
    parse_config(document)


def _at(path: str, value: Any) -> dict[str, Any]:
    document: Any = value
    for part in reversed(path.split(".")):
        document = {part: document}
    if f"{path.partition('.')[0]}.enabled" in KEYS and "." in path:
        document[path.partition(".")[0]]["enabled"] = True
    if path.startswith("optimizer."):
        document["optimizer"]["type"] = "AdamW"
    return document
