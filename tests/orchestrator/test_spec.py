from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.job_file import load_job
from rayzero.orchestrator.spec import JobSpec, Workers
from rayzero.workers.messages import SCRIPT_ENTRYPOINT

WHOLE = """
name: gpt-stdlib
entrypoint: examples.gpt.train:train
args: {layers: 4, width: 256}
engine: engine.json
workers: {min: 2, max: 4, cpus: 1, gpus: 0}
steps: 200
seed: 0
checkpoint: {path: runs, every_steps: 50, keep: 3, keep_every: 100, resume: auto, grace_period_s:
30}
recovery: {replicas: 1, hang_timeout_s: 30, max_faults: 20, fault_window_s: 3600, balance: even}
metrics: {port: 9400}
faults: ['kill(rank=1, step=7, phase="reduce")']
ledger: true
"""
SMALL = {"name": "job", "entrypoint": "m:f"}
BATCH_SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ENGINE = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "engine.json").write_text(json.dumps(ENGINE))
    return tmp_path


def load(folder: Path, document: Any, *overrides: str) -> JobSpec:
    path = folder / "job.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return load_job(path, overrides)


def test_job_file_of_documentation(folder: Path):
    spec = load(folder, WHOLE)
    assert (spec.name, spec.entrypoint) == ("gpt-stdlib", "examples.gpt.train:train")
    assert spec.args == {"layers": 4, "width": 256}
    assert spec.engine == ENGINE
    assert (spec.workers.min, spec.workers.most, spec.steps) == (2, 4, 200)
    assert spec.recovery.hang_timeout_s == 30


def test_minimal_job_file(folder: Path):
    spec = load(folder, SMALL)
    assert (spec.workers.min, spec.workers.most, spec.steps) == (1, 1, None)
    assert spec.engine is None
    assert (spec.metrics.port, spec.metrics.jsonl, spec.metrics.tensorboard) == (None, False, False)


def test_overrides_win_and_reach_into_engine_config(folder: Path):
    changes = ["steps=3", "workers.max=2", "engine.zero_optimization.stage=3", "args.data=/tmp/x"]
    spec = load(folder, WHOLE, *changes)
    assert (spec.steps, spec.workers.most) == (3, 2)
    assert isinstance(spec.engine, dict)
    assert spec.engine["zero_optimization"]["stage"] == 3
    assert spec.args["data"] == "/tmp/x"


def test_environment_of_workers(folder: Path):
    env = {"NCCL_DEBUG": "INFO", "NCCL_NVLS_ENABLE": "1", "TORCH_NCCL_BLOCKING_WAIT": "false"}
    assert load(folder, {**SMALL, "workers": {"env": env}}).workers.env == env
    assert load(folder, SMALL, "workers.env.NCCL_DEBUG=INFO").workers.env == {"NCCL_DEBUG": "INFO"}


def test_exponents_make_numbers(folder: Path):
    """PyYAML alone reads 1e-4 as a string."""
    text = "{name: job, entrypoint: 'm:f', args: {a: 1e-4, b: 2E+3, c: .5e1, d: '1e-4', e: 1e-4x}}"
    assert load(folder, text).args == {"a": 1e-4, "b": 2e3, "c": 5.0, "d": "1e-4", "e": "1e-4x"}
    assert load(folder, SMALL, "args.lr=3e-4").args == {"lr": 3e-4}


def test_inline_engine_config(folder: Path):
    assert load(folder, {**SMALL, "engine": ENGINE}).engine == ENGINE
    assert load(folder, {**SMALL, "engine": ENGINE}, "engine=null").engine is None
    assert load(folder, SMALL, "engine=engine.json").engine == ENGINE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 5}, ["step: unknown key", "did you mean 'steps'?"]),
        ({"workers": {"gpu": 1}}, ["workers.gpu: unknown key", "did you mean 'gpus'?"]),
        ({"steps": "many"}, ["steps:", "valid integer", "'many'"]),
        ({"steps": 1.5}, ["steps:", "1.5"]),
        ({"steps": 0}, ["steps:", "greater than or equal to 1"]),
        ({"workers": {"min": 0}}, ["workers.min:", "(seen: 0)"]),
        ({"workers": {"min": 3, "max": 2}}, ["workers.max:", "workers.min, which is 3"]),
        ({"workers": {"gpus": 2}}, ["workers.gpus:", "less than or equal to 1"]),
        ({"workers": 4}, ["workers:", "(seen: 4)"]),
        ({"workers": {"env": {"NCCL_DEBUG": 1}}}, ["workers.env.NCCL_DEBUG:", 'in quotes, "1"']),
        ({"workers": {"env": {"A-B": "1"}}}, ["workers.env:", "'A-B' is not the name"]),
        ({"workers": {"env": {"A": "\0"}}}, ["workers.env:", "NUL"]),
        ({"workers": {"env": {"RANK": "1"}}}, ["must not set RANK: each generation sets it"]),
        ({"workers": {"env": {"OMP_NUM_THREADS": "4"}}}, ["workers.cpus sets it"]),
        ({"workers": {"env": {"CUDA_VISIBLE_DEVICES": "4"}}}, ["Ray sets it"]),
        ({"workers": {"env": {"RAY_X": "4"}}}, ["must not set RAY_X: Ray reads it before"]),
        (
            {"workers": {"env": {"TORCH_NCCL_BLOCKING_WAIT": "yes"}}},
            ["not set TORCH_NCCL_BLOCKING_WAIT=yes: the host", "peer's death hangs the survivors"],
        ),
        ({"workers": {"env": {"A-B": "1", "WANDB_API_KEY": "key!"}}}, ["'WANDB_API_KEY': '***'"]),
        ({"name": "a/b"}, ["name:", "'a/b'"]),
        ({"name": "../up"}, ["name:"]),
        ({"entrypoint": "train"}, ["entrypoint:", "module:function"]),
        ({"engine": {"zero_optimization": {"stag": 2}}}, ["zero_optimization.stag", "'stage'"]),
        ({"engine": {"train_batch_size": "x"}}, ["train_batch_size"]),
        (
            {"engine": dict.fromkeys(BATCH_SIZES, 2) | {"train_batch_size": 9}},
            ["batch sizes disagree"],
        ),
        ({"engine": "nowhere.json"}, ["nowhere.json", "cannot be read"]),
        ({"checkpoint": {"path": "ftp://host/runs"}}, ["checkpoint.path", "s3://"]),
        ({"checkpoint": {"path": "s3://"}}, ["checkpoint.path", "s3://bucket/runs"]),
        ({"checkpoint": {"keep": 0}}, ["checkpoint.keep", "greater than or equal to 1"]),
        ({"recovery": {"balance": "fast"}}, ["recovery.balance", "'even' or 'auto'"]),
        ({"recovery": {"mirror_every": 0}}, ["recovery.mirror_every"]),
        ({"workers": {"spares": -1}}, ["workers.spares"]),
        (
            {"engine": {"zero_optimization": {"stage": 1}}, "workers": {"min": 2, "max": 4}},
            ["vary from 2 to 4 samples", "train_batch_size"],
        ),
        ({"metrics": {"port": 99999}}, ["metrics.port", "65535"]),
        ({"seed": -1, "steps": 0}, ["2 mistakes", "seed:", "steps:"]),
    ],
)
def test_each_error_has_a_message_with_path(folder: Path, change: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as caught:
        load(folder, {**SMALL, **change})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("document", "override", "words"),
    [
        ({"entrypoint": "m:f"}, "seed=1", "name: this key is required"),
        ({"name": "job"}, "seed=1", "entrypoint: this key is required"),
        ("", "seed=1", "a mapping of keys to values was expected"),
        ("- a\n- b\n", "seed=1", "a mapping of keys to values was expected, not list"),
        ("1: x\n", "seed=1", "a key is not text"),
        ("name: [unclosed\n", "seed=1", "is not YAML: line 2"),
        ("name: a\n\tsteps: 3\n", "seed=1", "is not YAML: line"),
        (SMALL, "steps", "has no '='"),
        (SMALL, "=3", "has no '='"),
        (SMALL, "steps=[", "is not YAML"),
        (SMALL, "name.x=3", "'name' is not a mapping"),
        (SMALL, "stepz=3", "unknown key"),
    ],
)
def test_file_or_override_is_refused(folder: Path, document: Any, override: str, words: str):
    with pytest.raises(ConfigError, match=words):
        load(folder, document, override)


def test_unreadable_job_file(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_job(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_job(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_job(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min": 3, "max": 2}, "workers: max: must not be less than workers.min, which is 3"),
        ({"mn": 3}, "workers: mn: unknown key (did you mean 'min'?)"),
    ],
)
def test_workers_class_reports_same_errors(values: dict[str, int], words: str):
    with pytest.raises(ConfigError) as error:
        Workers(**values)  # type: ignore[arg-type]
    assert words in str(error.value)


def test_old_key_name_is_accepted(folder: Path):
    spec = load(folder, {**SMALL, "checkpoint": {"notice_s": 7}})
    assert spec.checkpoint.grace_period_s == 7
    with pytest.raises(ConfigError, match="notice_s is the old name of grace_period_s"):
        load(folder, {**SMALL, "checkpoint": {"notice_s": 7, "grace_period_s": 8}})
    of_checkpoint = JobSpec.model_json_schema()["$defs"]["CheckpointSpec"]["properties"]
    assert "deprecated" in of_checkpoint["notice_s"]


def test_json_schema():
    schema = JobSpec.model_json_schema()
    assert {*yaml.safe_load(WHOLE), "launch"} == set(schema["properties"])
    of_recovery = schema["$defs"]["RecoverySpec"]["properties"]
    assert "seconds" in of_recovery["hang_timeout_s"]["description"]


def test_launch_takes_the_place_of_an_entrypoint():
    spec = JobSpec.model_validate({"name": "a", "launch": {"script": "t.py", "args": ["--n", 3]}})
    assert (spec.launch.args, spec.entrypoint) == (["--n", "3"], SCRIPT_ENTRYPOINT)
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec  # as the journal has it
    for wrong in ({"entrypoint": "m:f"}, {"args": {"a": 1}}, {"launch": {}}):
        with pytest.raises(ValueError, match="launch"):
            JobSpec.model_validate({"name": "a", "launch": {"script": "t.py"}} | wrong)
