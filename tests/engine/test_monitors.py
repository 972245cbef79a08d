"""Monitors: what rank 0 writes of each step, and how a run goes on."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import rayzero
from rayzero.engine import monitors
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.state.blocks import Block, StateSession
from tests.support.ranks import run_ranks

SAMPLES = 4


def train(config: dict[str, Any], steps: range, blocks: list[Block] | None = None) -> Any:
    """Trains, and returns (engine, losses)."""
    model = zoo.make_model(torch.float32)
    document = {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
    }
    with use_session(StateSession(blocks)):
        engine, *_ = rayzero.initialize(model=model, config=document | config)
    return engine, zoo.train(engine, list(zoo.batches(steps.stop, SAMPLES))[steps.start :])


def rows(folder: Path, name: str) -> list[list[str]]:
    with (folder / "job" / f"Train_Samples_{name}.csv").open(newline="") as file:
        return [*csv.reader(file)]


def csv_config(folder: Path) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"}}


def train_on_ranks(rank: int, world: int, folder: str) -> list[float]:
    return train(csv_config(Path(folder) / str(rank)), range(2))[1]


def test_rank_0_writes_csv_files(tmp_path: Path) -> None:
    losses = run_ranks(2, train_on_ranks, str(tmp_path))[0]
    expected = [["step", "train_loss"], ["4", str(losses[0])], ["8", str(losses[1])]]
    assert rows(tmp_path / "0", "train_loss") == expected
    assert rows(tmp_path / "0", "lr") == [["step", "lr"], ["4", "0.5"], ["8", "0.25"]]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert not (tmp_path / "0" / "job" / "Train_Samples_loss_scale.csv").exists()


def train_again(config: dict[str, Any]) -> tuple[Any, list[float]]:
    """Two steps, two that are lost with their worker, and those again: the engine, all losses."""
    engine, losses = train(config, range(2))
    blocks = [Block.of(engine)]
    train(config, range(2, 4), blocks)
    engine, again = train(config, range(2, 4), blocks)
    return engine, losses + again


STEPS = [4, 8, 12, 16]


def test_steps_that_are_done_again_are_there_once(tmp_path: Path) -> None:
    _, losses = train_again(csv_config(tmp_path))
    expected = [[str(step), str(loss)] for step, loss in zip(STEPS, losses, strict=True)]
    assert rows(tmp_path, "train_loss") == [["step", "train_loss"], *expected]


def test_loading_a_checkpoint_rewinds(tmp_path: Path) -> None:
    engine, _ = train(csv_config(tmp_path), range(1))
    engine.save_checkpoint(tmp_path / "saved")
    for _ in range(2):
        engine.load_checkpoint(tmp_path / "saved")
        zoo.train(engine, zoo.batches(1, SAMPLES))
    assert [row[0] for row in rows(tmp_path, "train_loss")] == ["step", "4", "8"]


def test_tensorboard(tmp_path: Path) -> None:
    """TensorBoard shows the values of steps that are done again once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = {"tensorboard": section, "fp16": {"enabled": True, "initial_scale_power": 4}}
    engine, losses = train_again(config)
    shown = EventAccumulator(str(tmp_path / "job")).Reload()
    tags = [f"Train/Samples/{name}" for name in ("train_loss", "lr", "loss_scale")]
    assert shown.Tags()["scalars"] == tags
    found = [[(it.step, it.value) for it in shown.Scalars(tag)] for tag in tags]
    assert found == [
        [(step, pytest.approx(loss)) for step, loss in zip(STEPS, losses, strict=True)],
        [(step, 0.5**n) for n, step in enumerate(STEPS, start=1)],
        [(step, engine.loss_scale) for step in STEPS],
    ]


def fake_wandb(started: list[dict[str, Any]], logged: list[Any]) -> ModuleType:
    module = ModuleType("wandb")

    def init(**arguments: Any) -> Any:
        started.append(arguments)
        run = SimpleNamespace(id=arguments["id"] or "made")
        run.log = lambda values, step: logged.append((step, *values))
        return run

    module.__dict__.update(run=None, init=init)
    return module


def test_wandb_continues_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(started, logged))
    monkeypatch.setattr(monitors, "is_installed", lambda _: True)
    config = {"wandb": {"enabled": True, "project": "p", "team": "t", "group": "g"}}
    engine, _ = train(config, range(1))
    train(config, range(1, 2), [Block.of(engine)])
    common = {"project": "p", "entity": "t", "group": "g", "resume": "allow"}
    assert started == [common | {"id": None}, common | {"id": "made"}]
    assert logged == [
        (samples, "Train/Samples/train_loss", "Train/Samples/lr") for samples in (4, 8)
    ]


def test_comet_gets_values_at_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: list[Any] = []
    names: list[str] = []
    experiment = SimpleNamespace(
        set_name=names.append,
        get_key=lambda: "key",
        log_metric=lambda name, value, step: logged.append((step, name)),
    )
    module = ModuleType("comet_ml")
    module.__dict__["start"] = lambda **arguments: started.append(arguments) or experiment
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    monkeypatch.setattr(monitors, "is_installed", lambda _: True)
    config = {"comet": {"enabled": True, "samples_log_interval": 8, "experiment_name": "n"}}
    engine, _ = train(config, range(3))
    assert [step for step, name in logged if name.endswith("lr")] == [4, 12]
    train(config, range(3, 4), [Block.of(engine)])
    assert [it["experiment_key"] for it in started] == [None, "key"]
    assert started[1]["mode"] == "get_or_create"
    assert names == ["n", "n"]


@pytest.mark.parametrize(("section", "package"), [("wandb", "wandb"), ("comet", "comet_ml")])
def test_missing_package_is_one_line(
    section: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of that name, which wandb leaves in a project, is no package."""
    (tmp_path / package).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        train({section: {"enabled": True}}, range(1))


def test_a_monitor_that_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "job").write_text("a file, where the folder would be")
    _, losses = train(csv_config(tmp_path), range(2))
    assert len(losses) == 2
    assert caplog.text.count("a monitor failed") == 1
