"""Resolution of "auto" values."""

from __future__ import annotations

from typing import Any

import pytest

from rayzero.engine.config import EngineConfig, parse_config
from rayzero.engine.config.model import FREE_FORM_SECTIONS
from rayzero.engine.config.normalize import AUTO_RULES, fill_total_steps
from rayzero.engine.config.parse import parse_with_provenance
from rayzero.engine.errors import ConfigError
from tests.engine.config.model import leaves

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
