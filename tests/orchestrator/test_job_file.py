"""Job files: keys, overrides, mistakes, hostile ones; differences of two; the plan of a job."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayzero.engine.config.model import EngineConfig
from rayzero.engine.data.batch_sizes import first_refused_size
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job_file import (
    check_batch_sizes,
    diff_documents,
    load_job,
    parse_worker_limits,
    to_document,
)
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.spec import CheckpointSpec, JobSpec, Workers
from rayzero.workers.messages import SCRIPT_ENTRYPOINT
from tests.support.mutations import mutate_text, mutate_tree, read_mutations, to_json

SMALL = "name: job\nentrypoint: m:f\n"
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
health: {slow_factor: 0.4}
metrics: {port: 9400}
records: {interval_s: 10, max_bytes: 1073741824}
faults: ['kill(rank=1, step=7, phase="reduce")']
ledger: true
rollouts: {group: 2, max_version_lag: 0, max_bytes: 1000}
roles:
  rollout: {entrypoint: 'examples.rl.rollout:generate', takes: prompts, workers: {min: 1, max: 4}}
"""
MINIMAL = {"name": "job", "entrypoint": "m:f"}
BATCH_SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ENGINE = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
JOB = {
    "name": "job",
    "entrypoint": "examples.gpt.train:train",
    "args": {"layers": 4, "width": 256, "data": ["a", "b"], "lr": 1e-4},
    "engine": {
        "train_batch_size": 32,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    },
    "workers": {"min": 2, "max": 4, "cpus": 1, "start_timeout_s": 60},
    "steps": 200,
    "seed": 1,
    "checkpoint": {"path": "runs", "every_steps": 50, "grace_period_s": 10},
    "recovery": {"replicas": 1, "hang_timeout_s": 30, "balance": "auto"},
    "metrics": {"port": 0, "jsonl": True},
    "faults": ["kill(rank=1, step=7)"],
}
NAMES = (*JobSpec.model_json_schema()["properties"], "min", "gpus", "resume", "stage")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("engine.json").write_text(json.dumps(ENGINE))


def load(content: str | bytes | dict[str, Any], *overrides: str) -> JobSpec:
    text = yaml.safe_dump(content) if isinstance(content, dict) else content
    Path("job.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_job(Path("job.yaml"), overrides)


def levels(count: int, width: int) -> str:
    lines = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * width)}]" for n in range(1, count + 1)]
    return "\n  ".join(["args:\n  x0: &x0 [lol]", *lines])


def test_job_file_of_documentation():
    spec = load(WHOLE)
    assert (spec.name, spec.entrypoint) == ("gpt-stdlib", "examples.gpt.train:train")
    assert spec.args == {"layers": 4, "width": 256}
    assert spec.engine == ENGINE
    assert (spec.workers.min, spec.workers.most, spec.steps) == (2, 4, 200)
    assert (spec.recovery.hang_timeout_s, spec.recovery.patience_s) == (30, 30), "as it has been"


def test_overrides_win_and_reach_into_engine_config():
    changes = ["steps=3", "workers.max=2", "engine.zero_optimization.stage=3", "args.data=/tmp/x"]
    spec = load(WHOLE, *changes)
    assert (spec.steps, spec.workers.most) == (3, 2)
    assert isinstance(spec.engine, dict)
    assert spec.engine["zero_optimization"]["stage"] == 3
    assert spec.args["data"] == "/tmp/x"


def test_environment_of_workers():
    env = {"NCCL_DEBUG": "INFO", "NCCL_NVLS_ENABLE": "1", "TORCH_NCCL_BLOCKING_WAIT": "false"}
    assert load({**MINIMAL, "workers": {"env": env}}).workers.env == env
    assert load(MINIMAL, "workers.env.NCCL_DEBUG=INFO").workers.env == {"NCCL_DEBUG": "INFO"}


def test_exponents_make_numbers():
    """PyYAML alone reads 1e-4 as a string."""
    text = "{name: job, entrypoint: 'm:f', args: {a: 1e-4, b: 2E+3, c: .5e1, d: '1e-4', e: 1e-4x}}"
    assert load(text).args == {"a": 1e-4, "b": 2e3, "c": 5.0, "d": "1e-4", "e": "1e-4x"}
    assert load(MINIMAL, "args.lr=3e-4").args == {"lr": 3e-4}


def test_inline_engine_config():
    assert load({**MINIMAL, "engine": ENGINE}).engine == ENGINE
    assert load({**MINIMAL, "engine": ENGINE}, "engine=null").engine is None
    assert load(MINIMAL, "engine=engine.json").engine == ENGINE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 1.5}, ["steps:", "1.5"]),
        ({"workers": {"min": 3, "max": 2}}, ["workers.max:", "workers.min, which is 3"]),
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
        ({"engine": {"zero_optimization": {"stag": 2}}}, ["zero_optimization.stag", "'stage'"]),
        ({"engine": {"train_batch_size": "x"}}, ["train_batch_size"]),
        (
            {"engine": dict.fromkeys(BATCH_SIZES, 2) | {"train_batch_size": 9}},
            ["batch sizes disagree"],
        ),
        ({"checkpoint": {"path": "ftp://host/runs"}}, ["checkpoint.path", "s3://"]),
        ({"checkpoint": {"path": "s3://"}}, ["checkpoint.path", "s3://bucket/runs"]),
        ({"recovery": {"mirror_every": 0}}, ["recovery.mirror_every"]),
        ({"workers": {"spares": -1}}, ["workers.spares"]),
        (
            {"engine": {"zero_optimization": {"stage": 1}}, "workers": {"min": 2, "max": 4}},
            ["vary from 2 to 4 samples", "train_batch_size"],
        ),
        (
            {"faults": ["kill(role='play', worker=0, step=1)"]},
            ["the job has no role 'play'; its roles: none"],
        ),
        ({"metrics": {"port": 99999}}, ["metrics.port", "65535"]),
        ({"seed": -1, "steps": 0}, ["2 mistakes", "seed:", "steps:"]),
    ],
)
def test_each_error_has_a_message_with_path(change: dict[str, Any], words: list[str]):
    """Further ones than those of a first hour (`cli/test_mistakes.py`)."""
    with pytest.raises(ConfigError) as caught:
        load({**MINIMAL, **change})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("document", "override", "words"),
    [
        ({"name": "job"}, "seed=1", "entrypoint: this key is required"),
        ("", "seed=1", "a mapping of keys to values was expected"),
        ("- a\n- b\n", "seed=1", "a mapping of keys to values was expected, not list"),
        ("1: x\n", "seed=1", "a key is not text"),
        ("name: [unclosed\n", "seed=1", "is not YAML: line 2"),
        ("name: a\n\tsteps: 3\n", "seed=1", "is not YAML: line"),
        (MINIMAL, "=3", "has no '='"),
        (MINIMAL, "name.x=3", "'name' is not a mapping"),
    ],
)
def test_file_or_override_is_refused(document: Any, override: str, words: str):
    with pytest.raises(ConfigError, match=words):
        load(document, override)


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


def test_old_key_name_is_accepted():
    spec = load({**MINIMAL, "checkpoint": {"notice_s": 7}})
    assert spec.checkpoint.grace_period_s == 7
    with pytest.raises(ConfigError, match="notice_s is the old name of grace_period_s"):
        load({**MINIMAL, "checkpoint": {"notice_s": 7, "grace_period_s": 8}})
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 2001-99-99", "steps: .*valid integer.*'2001-99-99'"),
        ("args: {day: 2001-01-01x}\nseed: =", "seed: .*valid integer.*'='"),
        ("seed: !!float x", "line 3, column 7: the tag tag:yaml.org,2002:float is not allowed"),
        ("ledger: !!bool x", "line 3, column 9: the tag"),
        ("args: {a: !!timestamp x}", "line 3, .*the tag"),
        ("args: {a: !!python/object/apply:os.system [x]}", "line 3, .*the tag"),
        ("args: &a [*a]", r"line 3, .*the alias \*a has no anchor before it, or is in it"),
        ("args: &a {<<: *a}", r"line 3, .*the alias \*a"),
        ("args: {a: &a {}, b: &a {<<: *a}}", r"line 3, .*the alias \*a"),
        (levels(9, 9), r"line 9, .*with its aliases it has more than 131072 characters"),
        (levels(9, 9).replace("[", "{<<: [").replace("]", "]}"), r"line 9, .*with its aliases"),
        ("args: {a: " + "[" * 1500, "line 3, column 109: nested too deeply: at most 100 levels"),
        ("args:\n" + "".join(" " * n + "a:\n" for n in range(1, 300)), "line 103, .*too deeply"),
        ("seed: " + "9" * 5000, "line 3, .*not a number of at most 1000 digits"),
        ("seed: " + "9" * 900, "seed: a number of 2990 bits is too large"),
        ("seed: 0b_", "line 3, column 7: 0b_ is not a number"),
        ("args: {x: 1" + ":59" * 400 + ".5}", "line 3, .* is not a number"),
        (r'args: {a: "\ud800"}', "line 3|args.a: .*not text"),
        ("args: {a: {b: 1e999}}", "args: a.b: a finite number was expected"),
        ("args: {a: [1, .nan]}", "args.a.1: a finite number was expected"),
        ("args: {1: x}", "args: a key is not text, but a int"),
        ("checkpoint: {lease_s: 1e6}", "checkpoint.lease_s: .*86400"),
        ("recovery: {hang_timeout_s: .inf}", "recovery.hang_timeout_s: .*inf"),
        ("recovery: {hang_timeout_s: 1e300}", "recovery.hang_timeout_s: .*1000000000"),
        ("workers: {max: 1000000000}", "workers.max: .*100000"),
        ("a: 1\n---\nb: 2", "line 4, .*another document"),
        ("args: {a: x" + "y" * 140_000, "has more than 131072 bytes"),
    ],
)
def test_hostile_job_file_is_a_config_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(SMALL + text)
    assert len(str(error.value)) < 1000


def test_message_of_many_mistakes_is_short() -> None:
    with pytest.raises(ConfigError, match="2000 mistakes:") as error:
        load(SMALL + "\n".join(f"k{i}: 1" for i in range(2000)))
    assert "... and 1950 more" in str(error.value)
    with pytest.raises(ConfigError, match="kkk: unknown key") as error:
        load(SMALL + f"? {'k' * 100_000}\n: 1")
    assert len(str(error.value)) < 1000


def test_dates_are_text_and_aliases_are_copies() -> None:
    spec = load(SMALL + "args: {day: 2001-01-01, a: &a {n: 010}, b: *a, c: {<<: *a, m: 1}}")
    copies = {"a": {"n": 8}, "b": {"n": 8}, "c": {"n": 8, "m": 1}}
    assert spec.args == {"day": "2001-01-01", **copies}
    assert load(SMALL + "args: {a: &a {n: 1}, b: *a}", "args.a.n=2").args["b"] == {"n": 1}


@pytest.mark.parametrize(
    "override",
    ["args.a=\udc80", "seed=!!int x", "args.a=*x", "args=[[", ".".join("a" * 3000) + "=1"],
)
def test_hostile_override_is_a_config_error(override: str) -> None:
    with pytest.raises(ConfigError, match=r"--set|args"):
        load(SMALL, override if override[1] == "r" or override[0] == "s" else f"args.{override}")


def test_only_regular_files_of_text_are_read() -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_job(Path("missing.yaml"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(b"\xff\xfe\x00")
    os.mkfifo("fifo")
    for path in ("fifo", "/dev/zero", "."):
        with pytest.raises(ConfigError, match=r"cannot be read: (it is not a regular|Is a dir)"):
            load_job(Path(path))
        with pytest.raises(ConfigError, match=r"cannot be read: (it is not a regular|Is a dir)"):
            load(f"{SMALL}engine: {Path(path).absolute()}")


def test_standard_input_may_be_a_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, SMALL.encode())
    os.close(writer)
    assert load_job(Path(f"/dev/fd/{reader}")).name == "job"
    os.close(reader)


@pytest.mark.parametrize("name", ["mutated text", "mutated values"])
def test_mutated_job_files_raise_only_our_own_errors(name: str) -> None:
    text = yaml.safe_dump(JOB).encode()

    def make(rng: random.Random) -> bytes:
        if name == "mutated text":
            return mutate_text(text, rng)
        return to_json(mutate_tree(JOB, rng, NAMES))

    def read(content: bytes) -> None:
        spec = load(content)
        document = to_document(spec)
        json.dumps(document, allow_nan=spec.engine is not None)
        diff_documents(document, JOB)
        if ".." not in spec.checkpoint.path and not spec.checkpoint.path.startswith("/"):
            make_plan(spec, spec.entrypoint)

    assert 0.25 < read_mutations(make, read, seed=3, sample=200) < 1


DEEP: Any = []
for _ in range(3000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"args": {"a": object()}}, "args: .*object"),
        ({"args": {"a": DEEP}}, "args: "),
        ({"args": DEEP}, r"args: keys and values were expected"),
        ({"args": {"a": {"b": float("inf")}}}, "args: a.b: a finite number"),
        ({"args": {"a": 10**5000}}, "args: a: a number of"),
        ({"steps": 10**5000}, "steps: .*too large to print"),
        ({"engine": {"optimizer": DEEP}}, "optimizer.*nested too deeply"),
        ({"engine": {"train_batch_size": float("inf")}}, "train_batch_size: .*inf"),
        ({"checkpoint": {"path": "a\0b"}}, "checkpoint.path"),
    ],
)
def test_hostile_argument_of_the_job_api_is_a_config_error(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Job("job", "m:f", **settings)


def config(**sizes: int) -> EngineConfig:
    names = {"total": "train_batch_size", "steps": "gradient_accumulation_steps"}
    names["micro"] = "train_micro_batch_size_per_gpu"
    return EngineConfig.model_validate({names[name]: size for name, size in sizes.items()})


def test_batch_smaller_than_the_number_of_workers_says_how_many_would_do() -> None:
    check_batch_sizes(config(total=7), 1, 7)
    with pytest.raises(
        ConfigError, match=r"enough for 7 workers at most.*workers.max is 8"
    ) as error:
        check_batch_sizes(config(total=7), 1, 8)
    assert "workers.max from 1 to 7" in str(error.value)


def test_refused_size_is_that_of_trying_each() -> None:
    rng = random.Random(1)
    for _ in range(300):
        total, steps, low = rng.randint(1, 300), rng.randint(1, 20), rng.randint(1, 9)
        high = rng.randint(low, max(low, total))
        per_rank = [(size, -(-total // size)) for size in range(low, high + 1)]
        refused = [n for n, share in per_rank if -(-share // -(-share // steps)) != steps]
        first = first_refused_size(config(total=total, steps=steps), low, high)
        assert first == (refused[0] if refused else low)


def test_large_ranges_of_workers_take_no_time() -> None:
    most = 2**62
    for sizes in ({}, {"micro": 3}, {"steps": 1}):
        check_batch_sizes(config(total=most, **sizes), 1, most)
    for sizes in ({"steps": 2**31}, {"steps": 7}, {"micro": 3, "steps": 5}):
        with pytest.raises(ConfigError):
            check_batch_sizes(config(total=most, **sizes), 1, most)


HUGE = pytest.param(10**5000, id="huge")


@pytest.mark.parametrize(
    "limits",
    ["1:999999999", HUGE, "9" * 5000, "2:1", (0, 4), ("a", 2), (1, 2, 3), (1, float("inf")), None],
)
def test_hostile_number_of_workers_is_a_config_error(limits: Any) -> None:
    with pytest.raises(ConfigError, match="is not a number of workers"):
        parse_worker_limits(limits)


def test_diff_redacts_changed_secret():
    old = {"args": {"hf_token": "p4ss"}, "checkpoint": {"path": "s3://k:p4ss@b/x"}, "seed": 1}
    new = {"args": {"hf_token": "w0rd"}, "checkpoint": {"path": "s3://k:w0rd@b/x"}, "seed": 2}
    assert list(diff_documents(old, new).values()) == [
        "args.hf_token: *** -> ***",
        'checkpoint.path: "s3://***@b/x" -> "s3://***@b/x"',
        "seed: 1 -> 2",
    ]
    (removed,) = diff_documents({"args": {"hf_token": "p4ss"}}, {}).values()
    assert removed == "args.hf_token: *** -> (none)"


def planned(**checkpoint: Any) -> JobPlan:
    spec = JobSpec(name="job", entrypoint="m:f", checkpoint=checkpoint)  # type: ignore[arg-type]
    return make_plan(spec, "m:f")


@pytest.fixture
def ray_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ray's copy of a working directory, as the current directory."""
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123abcd"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_checkpoint_folder_in_ray_working_directory_is_rejected(ray_copy: Path, tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        planned(path="runs", every_steps=10)
    assert "checkpoint.path is 'runs', which is in Ray's copy" in str(error.value)
    assert "--set checkpoint.path=" in str(error.value)
    assert not (ray_copy / "runs").exists()
    assert not planned(path=str(tmp_path / "runs"), every_steps=10).output_is_temporary
    assert not planned(path="s3://bucket/runs", every_steps=10).job_folder.startswith(str(ray_copy))
    # Without checkpoints it is only a warning.
    assert planned(path="runs").output_is_temporary


def test_threads_of_an_optimizer_beside_gpus_follow_from_the_node(tmp_path: Path):
    """Unless the job file says how many; the reservation stays one CPU."""

    def threads(workers: dict[str, Any], device: str) -> tuple[int, float]:
        engine = {
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": device, "nvme_path": str(tmp_path)},
            },
        }
        spec = JobSpec(name="job", entrypoint="m:f", workers=workers, engine=engine)  # type: ignore[arg-type]
        spec = spec.model_copy(update={"checkpoint": CheckpointSpec(path=str(tmp_path))})
        plan = make_plan(spec, "m:f")
        assert plan.worker_spec.cpus == plan.resources.cpus
        return plan.resources.threads, plan.resources.cpus

    assert threads({"gpus": 1}, "cpu") == (0, 1)
    assert threads({"gpus": 1, "cpus": 4}, "nvme") == (4, 4)
    assert threads({"gpus": 1}, "none") == (1, 1)
    assert threads({"gpus": 0, "cpus": 0.5}, "cpu") == (1, 0.5)


def test_relative_checkpoint_path_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    plan = planned(path="runs", every_steps=10)
    assert plan.output_dir == tmp_path / "runs" / "job"
    assert not plan.output_is_temporary
