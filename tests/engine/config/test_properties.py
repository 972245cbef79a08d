"""Any config either round-trips through parse and dump, or raises ConfigError."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayzero.engine.config import parse_config, read_config
from rayzero.engine.config.explain import key_infos
from rayzero.engine.config.fields import DTYPE_ALIASES
from rayzero.engine.config.keys import REFUSED
from rayzero.engine.config.model import FREE_FORM_SECTIONS, KEYS
from rayzero.engine.config.optimizers import ONEBIT_OPTIMIZERS, OPTIMIZERS
from rayzero.engine.config.parse import parse_with_provenance
from rayzero.engine.config.schedules import SCHEDULES
from rayzero.engine.errors import ConfigError
from rayzero.engine.redact import redact_document
from tests.engine.config.model import leaves
from tests.support.mutations import mutate_text, mutate_tree, read_mutations, to_json

FILES = sorted((Path(__file__).parent / "files").iterdir())
WHOLE = st.integers(1, 2**40) | st.integers(1, 2**40).map(str) | st.integers(1, 1000).map(float)
SHARE = st.floats(0, 1)
WITHOUT_MORE = [name for name in SCHEDULES if name not in ("WarmupDecayLR", "WarmupCosineLR")]
WITHOUT_MORE.remove("OneCycle")  # they have params that must be given
DENSE = [name for name in OPTIMIZERS if name not in ONEBIT_OPTIMIZERS]  # at every stage
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "optimizer.type": st.sampled_from([*DENSE, *map(str.lower, DENSE)]),
    "scheduler.type": st.sampled_from([*WITHOUT_MORE, *map(str.upper, WITHOUT_MORE)]),
    "checkpoint.tag_validation": st.sampled_from(["Warn", "IGNORE", "fail"]),
    "zero_optimization.stage": st.sampled_from([0, 1, 2, 3, "3", 2.0]),
    "zero_optimization.offload_optimizer.ratio": SHARE,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": SHARE,
    "rayzero.gather_buffers": st.integers(2, 9),
    "rayzero.compression.block_size": st.sampled_from([32, "64", 2048.0]),
    # Other values clash with other keys: two precisions, a choice at a stage without it.
    "zero_optimization.offload_param.device": st.just("none"),
    "zero_optimization.offload_optimizer.device": st.sampled_from(["none", "cpu"]),
    "zero_optimization.zero_quantized_weights": st.sampled_from([False, "False", 0]),
    "zero_optimization.zero_quantized_gradients": st.sampled_from([False, "False", 0]),
    "zero_optimization.zero_hpz_partition_size": st.sampled_from([0, 1, "1"]),
    "rayzero.compression.gradients": st.just("none"),
    "rayzero.unused_gradients": st.just("zero"),
    "fp16.enabled": st.just(False),
    "torch_autocast.enabled": st.just(False),
    "rayzero.reduce_each_micro_step": st.sampled_from([True, "true", 1]),
    "data_types.grad_accum_dtype": st.sampled_from(["fp32", "float32", "bf16", "bfloat16"]),
    "gradient_allreduce_op": st.sampled_from(["mean", "MEAN"]),
    "bf16.bf16_master_weights_and_grads": st.just(False),
    "bf16.bf16_optimizer_states": st.just(False),
    "autotuning.arg_mappings": st.dictionaries(st.text(), st.text(), max_size=2),
    "autotuning.start_profile_step": st.integers(1, 5),
    "autotuning.end_profile_step": st.integers(5, 9),
    "autotuning.min_train_micro_batch_size_per_gpu": st.just(1),
    "curriculum_learning.enabled": st.just(False),
    "curriculum_learning.schedule_config.difficulty": st.lists(WHOLE, max_size=3),
    "curriculum_learning.schedule_config.max_step": st.lists(WHOLE, max_size=3),
    "data_efficiency.enabled": st.just(False),
    "data_efficiency.data_routing.random_ltd.random_ltd_layer_id": st.lists(WHOLE, max_size=3),
    "progressive_layer_drop.theta": SHARE,
    "comet.mode": st.sampled_from(["get", "create", "get_or_create"]),
}
RATE = st.floats(0, 1) | st.floats(1e-9, 1).map(str) | st.integers(0, 1)
# Options common to all optimizers; tests/engine/optim tests specific options.
PARAMS = {
    "optimizer.params": st.fixed_dictionaries({}, optional={"lr": RATE, "weight_decay": RATE}),
    "compile.kwargs": st.fixed_dictionaries({}, optional={"dynamic": st.booleans()}),
    "scheduler.params": st.fixed_dictionaries({}, optional={"last_batch_iteration": WHOLE}),
}


def values(path: str, annotation: Any) -> st.SearchStrategy[Any]:
    """Valid values of the field, in all accepted spellings."""
    if path in FREE_FORM_SECTIONS:
        return PARAMS[path]
    if path in SPECIAL:
        return SPECIAL[path]
    kinds = set(_kinds(annotation))
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if tuple in {get_origin(kind) for kind in kinds}:
        return st.lists(st.text().filter(lambda text: text != "auto"), max_size=3)
    if bool in kinds:
        return st.booleans() | st.sampled_from(["true", "False", 0, 1])
    if int in kinds:
        return WHOLE
    if float in kinds:
        return st.floats(1e-9, 1e9) | st.integers(1, 9)
    if "dtype" in path or path.endswith("data_type"):
        return st.sampled_from(list(DTYPE_ALIASES))
    return st.text().filter(lambda text: text != "auto")


def _kinds(annotation: Any) -> Any:
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


VALUES = {
    path: values(path, field.annotation)
    for path, field in leaves()
    if KEYS[path].status is not REFUSED
}


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Documents of keys that are not refused."""
    document: dict[str, Any] = {}
    for path in draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=12)):
        *outer, last = path.split(".")
        node = document
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = draw(VALUES[path])
    for section, names in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULES)):
        if section in document:
            document[section].setdefault("type", names[0])
    return document


@given(configs())
@example({"compile": {"deepcompile": "true"}})
def test_valid_config_round_trip(document: dict[str, Any]) -> None:
    config = parse_config(document)
    for dump in (
        config.model_dump(mode="json"),
        config.model_dump(mode="json", exclude_unset=True),
        json.loads(config.model_dump_json()),
    ):
        assert parse_config(dump) == config
    assert parse_config(json.loads(json.dumps(document))) == config


def test_mutated_config_files_only_raise_config_error(tmp_path: Path) -> None:
    """As files, whole and in base64, with the keys' explanation, and dumped."""
    contents = [path.read_bytes() for path in FILES]
    documents = [json.loads(json.dumps(read_config(path))) for path in FILES]
    path = tmp_path / "config.json"

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return mutate_text(rng.choice(contents), rng)
        return to_json(mutate_tree(rng.choice(documents), rng))

    def check(content: bytes) -> None:
        path.write_bytes(content)
        infos = key_infos(parse_with_provenance(path))
        json.dumps([redact_document(info.value, info.key) for info in infos])
        config = parse_config(path)
        assert parse_config(base64.b64encode(content).decode()) == config
        assert parse_config(config.model_dump(mode="json")) == config

    assert read_mutations(make, check, seed=4, sample=200) > 0.1


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8")))
def test_random_bytes_only_raise_config_error(raw: bytes) -> None:
    text = raw.decode("latin-1")
    for source in (text, "{" + text, '{"train_batch_size": ' + text + "}"):
        try:
            parse_config(source)
        except ConfigError as error:
            message = str(error)
        else:
            message = "valid"
        assert message


@pytest.mark.parametrize("path", [path for path in KEYS if len(path.rpartition(".")[2]) > 4])
def test_misspelled_key_suggests_the_key(path: str) -> None:
    *outer, last = path.split(".")
    document: Any = {last[:-2] + last[-1]: 1}
    for part in reversed(outer):
        document = {part: document}
    if ".".join(outer) in FREE_FORM_SECTIONS:
        return
    with pytest.raises(ConfigError, match=rf"unknown key \(did you mean '{last}'\?\)"):
        parse_config(document)
