"""Mistakes of a first hour, as data: what is written, and what the error must say. None starts a
cluster or takes seconds, and none shows a traceback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner, Result

import rayzero
from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.cli.app import app

LIMIT_S = 3.0

FIRST = """
def train(ctx): ...
def two(ctx, other): ...
"""
JOB = """\
name: first
entrypoint: first:train
engine: ds.json
workers: {min: 2}
"""
ENGINE: Mapping[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}

# (what is replaced in JOB; "" appends), (what takes its place), (words of the error)
JOB_FILES: list[tuple[str, str, tuple[str, ...]]] = [
    ("{min: 2}", "16", ("workers: keys and values", '{"min": 16}', "seen: 16")),
    ("{min: 2}", "{count: 2}", ("workers.count: unknown key", "max, min")),
    ("{min: 2}", "{min: 0}", ("workers.min", "greater than or equal to 1", "seen: 0")),
    ("{min: 2}", "{gpus: 8}", ("workers.gpus", "less than or equal to 1", "seen: 8")),
    ("{min: 2}", "{gpu: 1}", ("workers.gpu: unknown key", "'gpus'")),
    ("{min: 2}", "{env: {A: 4}}", ("workers.env.A", 'in quotes, "4"')),
    ("name: first", "name: my job", ("name: must be letters, digits", "at most 63", "'my job'")),
    ("name: first", "name: 7", ("name: text was expected", 'in quotes, "7"')),
    ("name: first\n", "", ("name: this key is required",)),
    ("first:train", "first.py", ("module:function, such as first:train", "'first.py'")),
    ("first:train", "../first.py:train", ("module:function, such as first:train",)),
    ("first:train", "src/first.py:train", ("no module named 'src'",)),
    ("first:train", "first.py:trian", ("entrypoint 'first:trian'", "did you mean 'train'")),
    ("first:train", "first:two", ("two(ctx, other) cannot be called with ctx", "ctx.args")),
    ("first:train", "frist:train", ("no module named 'frist'",)),
    ("", "step: 10", ("step: unknown key", "'steps'")),
    ("", "steps: 0", ("steps", "greater than or equal to 1", "seen: 0")),
    ("", "steps: 10k", ("steps", "valid integer", "seen: '10k'")),
    (
        "",
        "checkpoint: {resume: runs/gone}",
        ("'runs/gone' cannot be resumed from", "no such folder"),
    ),
    ("", "checkpoint: s3://b/runs", ("checkpoint: keys and values", '{"path": "s3://b/runs"}')),
    ("", "checkpoint: {path: 'http://x'}", ("checkpoint.path", "s3://", "'http://x'")),
    ("", "checkpoint: 16", ("checkpoint: keys and values", '{"every_steps": 16}')),
    ("", "checkpoint: {every: 10}", ("checkpoint.every: unknown key", "'every_steps'")),
    ("", "checkpoint: {keep: 0}", ("checkpoint.keep", "greater than or equal to 1")),
    ("", "faults: ['kill(rank=1)']", ("kill needs step=", "kill(rank=, step=")),
    ("", "faults: kill(rank=1, step=3)", ("a list was expected", '["kill(rank=1, step=3)"]')),
    ("", "recovery: {balance: fast}", ("recovery.balance", "'even' or 'auto'", "'fast'")),
    ("", "\tsteps: 3", ("not YAML: line 5", "a tab; YAML is indented with spaces")),
    ("", "steps: 3\nsteps: 4", ("line 6, column 1: the key 'steps' is given twice",)),
    (JOB, "", ("keys to values was expected", "name: my-job")),
    ("ds.json", "nope.json", ("'nope.json' cannot be read", "`engine:` in the job file")),
    ("", "args: [1]", ("args: keys and values were expected", "seen: [1]")),
    ("", "launch: {script: first.py}", ("launch takes the place of entrypoint",)),
    ("{min: 2}", "{min: 2, max: 64}", ("32 workers at most", "workers.max from 1 to 32")),
]

# (keys that replace ENGINE's, or the text of the file), (words of the error)
ENGINES: list[tuple[dict[str, Any] | str, tuple[str, ...]]] = [
    ({"zero_optimisation": {}}, ("zero_optimisation: unknown key", "'zero_optimization'")),
    ({"zero_optimization": {"stage": 4}}, ("zero_optimization.stage", "0, 1, 2 or 3", "seen: 4")),
    ({"stage": 2}, ("stage: unknown key", "'zero_optimization.stage'")),
    (
        {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}},
        ("optimizer.params.learning_rate: unknown key", "did you mean 'lr'?"),
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"wd": 0.1}}},
        ("optimizer.params.wd: unknown key", "'weight_decay'"),
    ),
    ({"optimizer": {"type": "AdamW", "lr": 1}}, ("optimizer.lr: unknown key", "params")),
    ({"optimizer": {"type": "AdmW"}}, ("optimizer.type", "'AdamW'", "SGD", "seen: 'AdmW'")),
    ({"optimizer": "AdamW"}, ("optimizer: keys and values", '{"type": "AdamW"}')),
    ({"optimizer": {"type": "SGD", "params": {"lr": "fast"}}}, ("optimizer.params.lr", "'fast'")),
    ({"scheduler": {"type": "cosine"}}, ("scheduler.type", "WarmupCosineLR", "seen: 'cosine'")),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
        ("scheduler.params.warmup_steps: unknown key", "'warmup_num_steps'"),
    ),
    ({"gradient_accumulation_steps": 3}, ("the batch sizes disagree", "is 32", "is 48")),
    ({"gradient_accumulation": 3}, ("unknown key", "'gradient_accumulation_steps'")),
    ({"gradient_clipping": -1}, ("gradient_clipping", "greater than or equal to 0", "seen: -1")),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}},
        ("zero_optimization.offload_optimizer: keys and values", '{"device": "cpu"}'),
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
        ("zero_optimization.offload_optimizer.nvme_path", "a folder on a local disk"),
    ),
    ({"tensor_parallel": {"autotp_size": 4}}, ("tensor_parallel: refused", "stage 3")),
    ({"amp": {"enabled": True}}, ("amp: refused", "use bf16, fp16 or torch_autocast")),
    ('{"train_batch_size": NaN}', ("train_batch_size: a finite number was expected",)),
]

COMMANDS: list[tuple[str, tuple[str, ...]]] = [
    ("runn job.yaml", ("No such command 'runn'", "'run'")),
    ("run", ("Missing argument", "JOB.yaml")),
    ("run nope.yaml", ("'nope.yaml' cannot be read: No such file", "`rayzero run`")),
    ("run .", ("'.' cannot be read: Is a directory",)),
    ("run first.py", ("is a Python script", "`rayzero launch first.py`")),
    ("run ds.json", ("name: this key is required", "optimizer: unknown key")),
    ("run job.yaml --set steps", ("'steps' has no '='", "--set key=value")),
    ("run job.yaml --set stpes=3", ("stpes: unknown key", "'steps'")),
    ("run job.yaml --set steps={", ("--set 'steps={' is not YAML",)),
    ("run job.yaml --stes 3", ("No such option: --stes", "--set")),
    ("scale first many", ("'many' is not a number of workers", "such as 2:8")),
    ("scale first 4:2", ("'4:2' is not a number of workers", "1 <= MIN <= MAX")),
    ("resume nosuch", ("there is no journal in runs/nosuch", "--path")),
    ("chaos first kill", ("not a call", "kill(rank=1, step=7", "chaos --list")),
    ("ckpt ls s4://x/y", ("the URL s4://x/y cannot be used", "s3", "checkpoint.path")),
    ("ckpt prune runs --keep 0", ("--keep", "greater than or equal to 1")),
    ("config explain nope.json", ("'nope.json' cannot be read", "No such file")),
    ("plan first:train --batch first:train --gpu h900", ("--gpu 'h900'", "80GB", "h100")),
    ("launch nope.py", ("there is no file 'nope.py'",)),
    ("launch -m frist", ("there is no module 'frist' (did you mean 'first'?)", "launch -m")),
    ("launch -m nosuch.module", ("there is no module 'nosuch'", "can be imported from")),
    ("run job.yaml --set checkpoint.path=ds.json", ("ds.json/first' cannot be created",)),
    ("launch .", ("'.' cannot be read: Is a directory",)),
    ("launch job.yaml", ("job.yaml:2: invalid syntax: entry", "in Python")),
    ("launch --workers 2-4 first.py", ("'2-4' is not a number of workers", "2:8")),
    ("launch --stage 5 first.py", ("launch.stage", "less than or equal to 3", "seen: 5")),
]


class Broken(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        raise RuntimeError("no index file")

    def __getitem__(self, index: int) -> int:
        raise KeyError("nope")


class Unreadable(Broken):
    def __len__(self) -> int:
        return 8


SMALL = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def _initialize(**given: Any) -> rayzero.engine.api.engine.Engine:
    values = {"model": nn.Linear(4, 1), "config": SMALL} | given
    return rayzero.initialize(**values)[0]


Turn = Callable[[Any, Any], object]


def _loop(turn: Turn, data: Any = None) -> None:
    """A training loop over two micro-batches a step."""
    data = TensorDataset(torch.ones(16, 4), torch.ones(16, 1)) if data is None else data
    config = SMALL | {"train_micro_batch_size_per_gpu": 2}
    engine = _initialize(config=config, training_data=data)
    for batch in engine.training_dataloader or ():
        turn(engine, batch)


def _loss(engine: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(engine(batch[0]), batch[1])


def _detached(engine: Any, batch: Any) -> None:
    engine.backward(_loss(engine, batch).detach())


def _number(engine: Any, batch: Any) -> None:
    engine.backward(_loss(engine, batch).item())


CALLS: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
    (lambda: _initialize(model="gpt2"), ("got str", "a torch.nn.Module")),
    (lambda: _initialize(config="nope.json"), ("'nope.json' cannot be read", "`config=`")),
    (
        lambda: _initialize(training_data=DataLoader([1, 2])),  # type: ignore[arg-type]
        ("is a DataLoader", "__len__ and __getitem__", "training_data"),
    ),
    (lambda: _initialize(model=nn.Linear), ("got a class", "'in_features'", "model=Linear(...)")),
    (lambda: _initialize(model_parameters=nn.Linear(4, 1)), ("got Linear", "model.parameters()")),
    (
        lambda: _initialize(lr_scheduler=3),
        ("(lr_scheduler=...) got int", "a scheduler of the optimizer"),
    ),
    (lambda: _initialize(config=[1]), ("a list was given", "a dict, or the path")),
    (lambda: _initialize(training_data=Broken()), ("len() of the training data", "no index file")),
    (lambda: _loop(lambda engine, batch: None, Unreadable()), ("cannot be used", "'nope'")),
    (lambda: _loop(_detached), ("without a graph", "with gradients enabled")),
    (lambda: _loop(_number), ("backward() got a float", "a scalar loss")),
    (lambda: rayzero.Job("j", 3), ("of type int, which is not callable",)),  # type: ignore[arg-type]
    (lambda: rayzero.Job("j", lambda: None), ("<lambda>() cannot be called with ctx",)),
    (lambda: rayzero.Job("j", "m:f", workers=4), ("workers: keys and values", '{"min": 4}')),  # type: ignore[arg-type]
    (lambda: rayzero.Job("j", "m:f", args=[1]), ("args: keys and values were expected",)),  # type: ignore[arg-type]
    (
        lambda: rayzero.Job("j", "first:train", args={"a": threading.Lock()}).submit(),
        ("job 'j', args", "JSON types"),
    ),
    (
        lambda: rayzero.Job("j", "first:train", checkpoint={"path": "ds.json"}).submit(),
        ("ds.json/j' cannot be created: Not a directory", "checkpoint.path"),
    ),
    (lambda: rayzero.Job("j", "first:two").submit(), ("two(ctx, other) cannot be called",)),
    (lambda: rayzero.Job("j", "frist:train").submit(), ("'frist' (did you mean 'first'?)",)),
    (lambda: rayzero.Workers(mn=3), ("mn: unknown key", "'min'")),
]


class _NoCluster:
    def __init__(self, _: object) -> None: ...

    def start(self) -> None:
        pytest.fail("a cluster was started before the mistake was found")

    def stop(self) -> None: ...

    kill = stop


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayzero.orchestrator.cluster.local_cluster.LocalCluster", _NoCluster)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("first.py").write_text(FIRST)
    Path("job.yaml").write_text(JOB)
    Path("ds.json").write_text(json.dumps(ENGINE))


def _refused(command: str, words: tuple[str, ...]) -> Result:
    began_s = time.process_time()
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})
    assert time.process_time() - began_s < LIMIT_S
    assert isinstance(result.exception, SystemExit), result.output
    assert result.exit_code == 2
    assert [word for word in words if word not in result.output] == [], result.output
    assert "Traceback" not in result.output
    return result


@pytest.mark.parametrize(("old", "new", "words"), JOB_FILES, ids=[it[1] for it in JOB_FILES])
def test_job_file(old: str, new: str, words: tuple[str, ...]) -> None:
    Path("job.yaml").write_text(JOB.replace(old, new) if old else f"{JOB}{new}\n")
    result = _refused("run job.yaml", words)
    assert result.stderr.startswith("error: ")
    assert result.stdout in ("", "job first\n")


@pytest.mark.parametrize(("change", "words"), ENGINES, ids=[str(it[0]) for it in ENGINES])
def test_engine_config(change: dict[str, Any] | str, words: tuple[str, ...]) -> None:
    text = change if isinstance(change, str) else json.dumps({**ENGINE, **change})
    Path("ds.json").write_text(text)
    _refused("run job.yaml", words)


@pytest.mark.parametrize(("command", "words"), COMMANDS, ids=[it[0] for it in COMMANDS])
def test_command(command: str, words: tuple[str, ...]) -> None:
    _refused(command, words)


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[it[1][0] for it in CALLS])
def test_call(call: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(RayzeroError) as raised:
        call()
    assert [word for word in words if word not in str(raised.value)] == [], raised.value
