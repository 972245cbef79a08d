"""Real DeepSpeed config files can be read, without unknown keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.config import EngineConfig, parse_config, read_config
from rayzero.engine.errors import ConfigError

FILES = sorted((Path(__file__).parent / "files").iterdir())
READS: dict[str, dict[str, Any]] = {
    "transformers_saved.json": {
        "gradient_accumulation_steps": 4,
        "zero_optimization.stage": 3,
        "zero_optimization.reduce_bucket_size": 16_777_216,
        "zero_optimization.stage3_prefetch_bucket_size": 15_099_494,
        "steps_per_print": 2**63 - 1,
    },
    "accelerate_template.json": {
        "bf16.enabled": True,
        "train_batch_size": None,
        "gradient_clipping": 1.0,
        "zero_optimization.stage": 0,
        "zero_optimization.offload_optimizer.device": "none",
    },
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_real_file_has_no_unknown_keys(path: Path) -> None:
    """Keys may be unsupported, but none is unknown or misread."""
    try:
        parse_config(path)
    except ConfigError as error:
        text = str(error)
        if "\n" not in text:
            text = text.partition("': ")[2]
        lines = [line.strip() for line in text.splitlines() if "mistakes:" not in line]
        known = ("refused: ", "that this", "two gradient compressions")
        unknown = [line for line in lines if not any(reason in line for reason in known)]
        assert unknown == []


@pytest.mark.parametrize("name", READS)
def test_values_of_a_real_file(name: str) -> None:
    config = parse_config(next(path for path in FILES if path.name == name))
    for path, value in READS[name].items():
        assert _get(config, path) == value, path


def test_old_offload_keys_equal_the_new_ones() -> None:
    old = read_config(next(path for path in FILES if path.name == "zero_offload_old.json"))
    new = {key: value for key, value in old.items() if key != "zero_optimization"}
    new["zero_optimization"] = {
        key: value
        for key, value in old["zero_optimization"].items()
        if key not in ("cpu_offload", "cpu_offload_params")
    } | {"offload_optimizer": {"device": "cpu"}}
    assert _parse_or_error(old) == _parse_or_error(new)


def _parse_or_error(document: dict[str, Any]) -> Any:
    try:
        return parse_config(document)
    except ConfigError as error:
        return str(error)


def _get(config: EngineConfig, path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        node = getattr(node, part)
    return node
