"""`rayzero config explain`: the source of each value; JSON schema for editors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rayzero.engine.config.explain import (
    KeyInfo,
    _log_once,
    is_set_or_active,
    json_schema,
    key_infos,
    log_explanation,
)
from rayzero.engine.config.keys import IMPLEMENTED, NO_OP, REFUSED
from rayzero.engine.config.model import KEYS
from rayzero.engine.config.normalize import OLD_NAMES, get_path
from rayzero.engine.config.parse import parse_with_provenance
from tests.engine.config.model import leaves

FILES = sorted((Path(__file__).parent / "files").iterdir())
DOCUMENT = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": "auto",
    "bfloat16": True,
    "optimizer": {"type": "adam", "params": {"lr": "auto", "weight_decay": 0.1, "x": "auto"}},
    "zero_optimization": {"stage": "2", "reduce_scatter": False, "contiguous_gradients": True},
    "amp": {"enabled": False},
}


def by_key(document: dict[str, Any] | None) -> dict[str, KeyInfo]:
    infos = list(key_infos(parse_with_provenance(document)))
    assert len({info.key for info in infos}) == len(infos)
    return {info.key: info for info in infos}


def test_every_value_has_a_source() -> None:
    infos = by_key(DOCUMENT)
    values = {key: (info.value, info.source) for key, info in infos.items()}
    assert values["train_batch_size"] == (64, "file")
    assert values["train_micro_batch_size_per_gpu"][0] is None
    assert values["train_micro_batch_size_per_gpu"][1].startswith("auto: left out: computed from")
    assert values["bf16.enabled"] == (True, "old name bfloat16")
    assert values["optimizer.type"] == ("Adam", "file")
    assert values["optimizer.params.lr"][1].startswith("auto: the default of transformers")
    assert values["optimizer.params.weight_decay"] == (0.1, "file")
    assert values["optimizer.params.x"] == (None, "auto: left out: the key's default")
    assert values["zero_optimization.stage"] == (2, "file")
    assert values["zero_optimization.overlap_comm"] == (True, "default")
    assert values["amp"] == ({"enabled": False}, "file")


def test_keys_in_effect() -> None:
    infos = by_key(DOCUMENT)
    assert infos["zero_optimization.stage"].in_force
    assert infos["bf16.enabled"].in_force
    assert not infos["zero_optimization.reduce_scatter"].in_force
    assert infos["zero_optimization.reduce_scatter"].status is NO_OP
    assert infos["zero_optimization.reduce_scatter"].reason
    assert not infos["amp"].in_force
    assert infos["amp"].status is REFUSED
    shown = {key for key, info in infos.items() if is_set_or_active(info)}
    assert {"amp", "zero_optimization.reduce_scatter", "zero_optimization.overlap_comm"} <= shown
    assert "zero_optimization.round_robin_gradients" not in shown
    assert all(infos[key].status is IMPLEMENTED for key in shown if infos[key].source == "default")


def test_every_key_is_listed() -> None:
    assert set(by_key(None)) == set(KEYS) - set(
        ("optimizer scheduler optimizer.params scheduler.params compile.kwargs").split()
    )


def test_derived_values_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _log_once.cache_clear()
    parsed = parse_with_provenance(DOCUMENT)
    for _ in range(2):
        log_explanation(parsed)
    lines = [record.message for record in caplog.records]
    assert len(lines) == len(set(lines)) == len(parsed.provenance) + 1
    assert "config: bf16.enabled is True (old name bfloat16)" in lines
    # reduce_scatter is set to a value that has no effect; contiguous_gradients to the actual one.
    assert lines[-1].startswith("config: no effect here: zero_optimization.reduce_scatter (")


def test_schema_accepts_valid_configs() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(DOCUMENT)
    for number in ("8", "auto", "5e8", "15099494.4", ".5", "Infinity", "1_000"):
        validator.validate({"zero_optimization": {"reduce_bucket_size": number}})
    for path in FILES:
        if path.suffix == ".json":
            # The parser checks names of optimizers, because they are case-insensitive.
            validator.validate(json.loads(path.read_text(encoding="utf-8")))
    for invalid in (
        {"train_batch_siz": 1},
        {"zero_optimization": {"stge": 1}},
        {"zero_optimization": {"stage": 7}},
        {"bf16": {"enabled": "perhaps"}},
        {"train_batch_size": "many"},
        {"optimizer": {"params": {}}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(invalid)


def test_schema_describes_every_key() -> None:
    schema = json_schema()
    for path in [*KEYS, *(entry.old for entry in OLD_NAMES)]:
        node = schema
        for part in path.split("."):
            options = node.get("anyOf", [node])
            node = next(entry for entry in options if part in entry.get("properties", {}))[
                "properties"
            ][part]
        assert node["description"], path
        assert node.get("deprecated", False) == (path not in KEYS)
    for path, field in leaves():
        if field.default is None or "." in path:
            continue
        assert get_path(schema, f"properties.{path}.default") == field.default
