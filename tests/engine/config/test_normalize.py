"""What is rewritten before validation: old spellings, "auto", and what libraries pass."""

from __future__ import annotations

import enum
import logging
from typing import Any

import pytest
import torch

from rayzero.engine.config import EngineConfig, parse_config
from rayzero.engine.config.explain import _log_once, key_infos, log_explanation
from rayzero.engine.config.model import FREE_FORM_SECTIONS
from rayzero.engine.config.normalize import AUTO_RULES, fill_total_steps, normalize
from rayzero.engine.config.parse import parse_with_provenance
from rayzero.engine.errors import ConfigError
from tests.engine.config.model import leaves

ZERO = "zero_optimization"


def zero(**section: Any) -> dict[str, Any]:
    return {ZERO: section}


ON_CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"bfloat16": True}, {"bf16": {"enabled": True}}),
        ({"bf16": {"check_overflow": True}}, {"bf16": {"check_grad_overflow": True}}),
        ({"fp16": False}, {"fp16": {"enabled": False}}),
        ({"fp32_allreduce": True}, {"communication_data_type": "fp32"}),
        ({"fp32_allreduce": False}, {}),
        ({ZERO: True}, zero(stage=1)),
        ({ZERO: False}, zero(stage=0)),
        ({ZERO: True, "allgather_size": 5e8}, zero(stage=1, allgather_bucket_size=5e8)),
        (zero(cpu_offload=True), zero(offload_optimizer=ON_CPU)),
        (
            zero(cpu_offload=True, offload_optimizer={"ratio": 0.5}),
            zero(offload_optimizer={"ratio": 0.5} | ON_CPU),
        ),
        (zero(cpu_offload=False), zero()),
        (zero(cpu_offload=False, offload_optimizer=ON_CPU), zero(offload_optimizer=ON_CPU)),
        (zero(cpu_offload_params=True), zero(offload_param=ON_CPU)),
        (zero(cpu_offload_param=True), zero(offload_param=ON_CPU)),
        (zero(offload_optimizer=True), zero(offload_optimizer=ON_CPU)),
        (zero(offload_param=False), zero(offload_param={"device": "none"})),
        (
            zero(stage3_gather_fp16_weights_on_model_save=True),
            zero(stage3_gather_16bit_weights_on_model_save=True),
        ),
        (zero(prefetch_bucket_size=5), zero(stage3_prefetch_bucket_size=5)),
    ],
)
def test_old_spellings_are_rewritten(old: dict[str, Any], new: dict[str, Any]) -> None:
    mistakes: list[str] = []
    normalize(old, mistakes)
    assert (old, mistakes) == (new, [])


def test_conflicting_old_and_new_names_are_an_error() -> None:
    document = {"bfloat16": {"enabled": True}, "bf16": {"enabled": True}}
    assert parse_config(document).bf16.enabled
    with pytest.raises(ConfigError, match=r"prefetch_bucket_size: is the old name of .* disagree"):
        parse_config({ZERO: {"prefetch_bucket_size": 5, "stage3_prefetch_bucket_size": 6}})
    with pytest.raises(ConfigError, match=r"bfloat16: is the old name of bf16, .* disagree"):
        parse_config({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}})
    with pytest.raises(ConfigError, match=r"cpu_offload: true or false was expected"):
        parse_config({ZERO: {"cpu_offload": {"device": "cpu"}}})
    with pytest.raises(
        ConfigError, match=r"cpu_offload: is the old name of .* whose section is not a mapping"
    ):
        parse_config({ZERO: {"cpu_offload": True, "offload_optimizer": 3}})


AUTO = "auto"


def test_common_auto_values() -> None:
    optimizer = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)
    warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO)
    parsed = parse_with_provenance(
        dict.fromkeys(
            ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), AUTO
        )
        | {
            "gradient_accumulation_steps": 4,
            "bf16": {"enabled": AUTO},
            "optimizer": {"type": "AdamW", "params": optimizer},
            "scheduler": {"type": "WarmupLR", "params": warmup},
            "zero_optimization": {"stage": 3, "reduce_bucket_size": AUTO},
        }
    )
    config = parsed.config
    assert config.train_batch_size is config.train_micro_batch_size_per_gpu is None
    assert config.gradient_clipping == 1.0
    assert not config.bf16.enabled
    assert config.optimizer is not None
    assert [*config.optimizer.params.values()] == [5e-5, [0.9, 0.999], 1e-8, 0.0]
    assert config.scheduler is not None
    assert [*config.scheduler.params.values()] == [0, 5e-5, 0]
    assert config.zero_optimization.reduce_bucket_size is None
    assert len(parsed.provenance) == 12
    assert parsed.provenance["scheduler.params.warmup_max_lr"] == "auto: optimizer.params.lr"
    assert parsed.provenance["zero_optimization.reduce_bucket_size"].startswith("auto: left out")


@pytest.mark.parametrize("path", [path for path, _ in leaves() if path not in FREE_FORM_SECTIONS])
def test_every_key_may_be_auto(path: str) -> None:
    """The value is the default unless a rule exists."""
    document: Any = AUTO
    for part in reversed(path.split(".")):
        document = {part: document}
    if path.startswith(("optimizer.", "scheduler.")):
        document[path.split(".")[0]].setdefault("type", "SGD")
    if path in ("optimizer.type", "scheduler.type"):
        with pytest.raises(ConfigError, match=rf"{path}: this key is required"):
            parse_config(document)
        return
    config = parse_config(document)
    if path not in AUTO_RULES and "." in path and "optimizer" not in path:
        assert config == EngineConfig()


def test_number_of_steps_is_that_of_the_job() -> None:
    document = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": AUTO}}}
    with pytest.raises(
        ConfigError, match=r"^[^\n]*total_num_steps: auto is the number of steps[^\n]*$"
    ):
        parse_config(document)
    config = parse_with_provenance(document, steps=70).config
    assert config.scheduler is not None
    assert config.scheduler.params == {"total_num_steps": 70}
    assert fill_total_steps({"scheduler": AUTO}, 70) == {"scheduler": AUTO}


BUCKET = "zero_optimization.reduce_bucket_size"


class Device(str, enum.Enum):  # noqa: UP042  as DeepSpeed's OffloadDeviceEnum
    CPU = "cpu"


class Stage(int, enum.Enum):
    WEIGHTS = 3


class Dtype(enum.Enum):
    BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("document", "size"),
    [
        ({BUCKET: 64, "zero_optimization": {"stage": 3}}, 64),
        ({BUCKET: 64, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}, 64),
        ({BUCKET: 64, "zero_optimization": {"stage": 3, "reduce_bucket_size": 32}}, 32),
    ],
)
def test_dotted_keys(document: dict[str, Any], size: int) -> None:
    zero = parse_config(document).zero_optimization
    assert (zero.stage, zero.reduce_bucket_size) == (3, size)


def test_dotted_key_of_an_old_name() -> None:
    config = parse_config({"zero_optimization.prefetch_bucket_size": 7})
    assert config.zero_optimization.stage3_prefetch_bucket_size == 7


def test_enums_stand_for_their_values() -> None:
    config = parse_config(
        {
            "zero_optimization": {"stage": Stage.WEIGHTS, "offload_param": {"device": Device.CPU}},
            "data_types": {"grad_accum_dtype": Dtype.BF16},
            "communication_data_type": torch.float32,
        }
    )
    assert config.zero_optimization.stage == 3
    assert config.zero_optimization.offload_param.device == "cpu"
    assert config.data_types.grad_accum_dtype == "bf16"
    assert config.communication_data_type == "fp32"


def test_unknown_keys_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    _log_once.cache_clear()
    document = {
        "cuda_visible_devices": "0",
        "fp16_opt_level": "O2",
        "checkpoint": {"zebra": 1},
        "optimizer": {"type": "Adam", "torch_adam": True, "legacy_fusion": "x"},
    }
    parsed = parse_with_provenance(document)
    assert parsed.ignored == ["cuda_visible_devices", "fp16_opt_level", "checkpoint.zebra"]
    with caplog.at_level(logging.WARNING):
        log_explanation(parsed)
    assert "cuda_visible_devices, fp16_opt_level, checkpoint.zebra" in caplog.text
    assert {"cuda_visible_devices", "checkpoint.zebra"} <= {it.key for it in key_infos(parsed)}


@pytest.mark.parametrize(
    "document",
    [
        {"train_batch_sizes": 1},
        {"stage": 2},
        {"zero_optimization": {"zebra": 2}},
        {"rayzero": {"zebra": 2}},
        {"zero_optimization.reduce_bucket_sze": 2},
        {"optimizer": {"type": "Adam", "parms": {}}},
    ],
)
def test_other_unknown_keys_are_errors(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        parse_config(document)


def test_leaf_modules_may_be_one_name() -> None:
    leaf = {"classes": "MoeBlock", "name_suffixes": ["mlp"]}
    read = parse_config({"zero_optimization": {"leaf_module": leaf}}).zero_optimization.leaf_module
    assert (read.classes, read.names, read.name_suffixes) == (("MoeBlock",), (), ("mlp",))
