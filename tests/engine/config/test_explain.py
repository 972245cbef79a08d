"""What is said of a config: where each value came from, and the schema for editors."""

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
    found = list(key_infos(parse_with_provenance(document)))
    assert len({fact.key for fact in found}) == len(found)
    return {fact.key: fact for fact in found}


def test_every_value_says_where_it_came_from() -> None:
    found = by_key(DOCUMENT)
    told = {key: (fact.value, fact.source) for key, fact in found.items()}
    assert told["train_batch_size"] == (64, "file")
    assert told["train_micro_batch_size_per_gpu"][0] is None
    assert told["train_micro_batch_size_per_gpu"][1].startswith("auto: left out: computed from")
    assert told["bf16.enabled"] == (True, "old name bfloat16")
    assert told["optimizer.type"] == ("Adam", "file")
    assert told["optimizer.params.lr"][1].startswith("auto: the default of transformers")
    assert told["optimizer.params.weight_decay"] == (0.1, "file")
    assert told["optimizer.params.x"] == (None, "auto: left out: the key's default")
    assert told["zero_optimization.stage"] == (2, "file")
    assert told["zero_optimization.overlap_comm"] == (True, "default")
    assert told["amp"] == ({"enabled": False}, "file")


def test_what_is_in_force_is_what_has_an_effect() -> None:
    found = by_key(DOCUMENT)
    assert found["zero_optimization.stage"].in_force
    assert found["bf16.enabled"].in_force
    assert not found["zero_optimization.reduce_scatter"].in_force
    assert found["zero_optimization.reduce_scatter"].status is NO_OP
    assert found["zero_optimization.reduce_scatter"].reason
    assert not found["amp"].in_force
    assert found["amp"].status is REFUSED
    shown = {key for key, fact in found.items() if is_set_or_active(fact)}
    assert {"amp", "zero_optimization.reduce_scatter", "zero_optimization.overlap_comm"} <= shown
    assert "zero_optimization.round_robin_gradients" not in shown
    assert all(found[key].status is IMPLEMENTED for key in shown if found[key].source == "default")


def test_every_row_has_a_fact() -> None:
    assert set(by_key(None)) == set(KEYS) - {
        *("optimizer", "scheduler", "optimizer.params", "scheduler.params"),
    }


def test_what_its_text_does_not_say_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _log_once.cache_clear()
    parsed = parse_with_provenance(DOCUMENT)
    for _ in range(2):
        log_explanation(parsed)
    lines = [record.message for record in caplog.records]
    assert len(lines) == len(set(lines)) == len(parsed.provenance) + 1
    assert "config: bf16.enabled is True (old name bfloat16)" in lines
    # reduce_scatter was written as it is not here; contiguous_gradients as it is.
    assert lines[-1].startswith("config: no effect here: zero_optimization.reduce_scatter (")


def test_the_schema_takes_what_the_parser_takes() -> None:
    made = json_schema()
    jsonschema.Draft202012Validator.check_schema(made)
    validator = jsonschema.Draft202012Validator(made)
    validator.validate(DOCUMENT)
    for path in FILES:
        if path.suffix == ".json":
            # Names of optimizers are told by the parser, for they may be in any case.
            validator.validate(json.loads(path.read_text(encoding="utf-8")))
    for wrong in (
        {"train_batch_siz": 1},
        {"zero_optimization": {"stge": 1}},
        {"zero_optimization": {"stage": 7}},
        {"bf16": {"enabled": "perhaps"}},
        {"optimizer": {"params": {}}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(wrong)


def test_the_schema_describes_every_key() -> None:
    made = json_schema()
    for path in [*KEYS, *(one.old for one in OLD_NAMES)]:
        here = made
        for part in path.split("."):
            options = here.get("anyOf", [here])
            here = next(one for one in options if part in one.get("properties", {}))["properties"][
                part
            ]
        assert here["description"], path
        assert here.get("deprecated", False) == (path not in KEYS)
    for path, field in leaves():
        if field.default is None or "." in path:
            continue
        assert get_path(made, f"properties.{path}.default") == field.default
