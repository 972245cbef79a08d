"""A whole job under the real controller, seen through its telemetry."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.machine import State, StopRequested
from rayzero.orchestrator.metrics.telemetry import Telemetry
from rayzero.workers.messages import Pinned
from tests.orchestrator.support import NO_FILES, Stage, VirtualClock, plan, played, settle
from tests.orchestrator.world import World


@played
async def test_a_job_with_a_fault_adds_up(tmp_path: Path):
    stage = Stage(tmp_path, World(size=3), workers={"min": 1, "max": 3}, steps=10)
    await stage.clock.turn(5.0)  # nothing takes time in this world but what is waited for
    await stage.steps(2)
    stage.world.kill(1)
    await settle()
    await stage.clock.turn(2.0)
    await stage.steps(3)
    stage.world.beat(0, phase="backward", silent_s=1.5)
    stage.world.beat(1)  # it is dead, and no rank's series come back with what it said last
    await settle()
    seen = stage.told.snapshot()
    beats = {rank["rank"]: (rank["phase"], rank["silent_s"]) for rank in seen["ranks"]}
    assert beats == {0: ("backward", 1.5), 1: (None, None)}
    assert seen["ranks"][0]["node"] == "host-a"
    assert (seen["state"], seen["world_size"], seen["progress"]["step"]) == ("running", 2, 5)
    assert {rank["rank"] for rank in seen["ranks"]} == {0, 1}
    assert [one["cause"] for one in seen["faults"]] == ["lost"]
    assert [one["kind"] for one in seen["recoveries"]] == ["repair"]
    await stage.finish()
    told = stage.told.snapshot()
    assert told["state"] == "succeeded"
    goodput = told["goodput"]
    assert goodput["unattributed_s"] == 0
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_s"])
    assert goodput["wall_s"] == pytest.approx(stage.clock.now())


@played
async def test_the_limits_and_the_faults_on_record_are_told(tmp_path: Path):
    stage = Stage(tmp_path, World(size=2), workers={"min": 1, "max": 2})
    await stage.steps(1)
    stage.controller.scale(1, 3)
    stage.world.kill(0)
    await stage.clock.turn(1.0)
    values = {one.name: one for one in stage.told.collect()}
    limits = {one.labels["limit"]: one.value for one in values["rayzero_workers"].samples}
    assert limits == {"min": 1, "max": 3}
    assert counted(values["rayzero_faults"]) == {"lost": 1}
    stage.controller.post_event(StopRequested())
    await stage.clock.turn(10.0)
    assert stage.states[-1] is State.STOPPED
    await settle()
    assert stage.run.done()
    assert stage.run.exception() is not None


@played
async def test_the_fault_that_ends_a_job_is_counted_once(tmp_path: Path):
    stage = Stage(tmp_path, World(size=2))
    await settle()
    for rank in (0, 1):  # no step was finished: user code that fails now fails the job
        stage.world.crash(rank, "user")
    await stage.clock.turn(10.0)
    assert stage.states[-1] is State.FAILED
    values = {one.name: one for one in stage.told.collect()}
    assert counted(values["rayzero_faults"]) == {"user": 1}
    assert stage.told.snapshot()["goodput"]["unattributed_s"] == 0
    assert stage.run.exception() is not None


@played
async def test_copies_on_other_nodes_are_told_as_they_are_made(tmp_path: Path):
    world = World(2, "ab".__getitem__)
    stage = Stage(tmp_path, world, workers={"min": 2, "max": 2}, steps=10)
    await stage.steps(2)
    for rank in range(2):
        world.say(rank, Pinned(1, rank, 1, False, 0.0))
    await settle()
    values = {one.name: one for one in stage.told.collect()}
    newest = {one.labels["place"]: one.value for one in values["rayzero_replica_step"].samples}
    assert newest["other"] == 1
    assert stage.told.snapshot()["replicas"]["step_on_other_nodes"] == newest["other"]
    await stage.finish()


@played
async def test_series_of_ranks_can_be_left_out(tmp_path: Path):
    for wanted in (True, False):
        folder = tmp_path / str(wanted)
        folder.mkdir()
        stage = Stage(folder, World(2), workers={"min": 2}, metrics={"per_rank": wanted})
        await stage.steps(2)
        stage.world.beat(0)
        await settle()
        told = {one.name: one for one in stage.told.collect()}
        assert any("rank" in one.labels for f in told.values() for one in f.samples) is wanted
        assert told["rayzero_world_size"].samples[0].value == 2
        assert stage.told.snapshot()["ranks"]
        await stage.finish()


def counted(family: Metric) -> dict[str, float]:
    """Counters by cause, without those at 0."""
    return {one.labels["cause"]: one.value for one in family.samples if one.value}


def test_files_and_the_endpoint_live_as_long_as_it(tmp_path: Path):
    metrics = {"port": 0, "jsonl": True, "tensorboard": True}
    wanted = plan(tmp_path, metrics=metrics)
    writer = BackgroundWriter(print)
    with closing(Telemetry(wanted, VirtualClock(), writer)) as told:
        assert told.url is not None
        assert told.url.startswith("http://127.0.0.1:")
        port = int(told.url.rsplit(":", 1)[1])
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert writer.close(10)
    names = {path.name for path in wanted.output_dir.iterdir()}
    assert {"metrics.jsonl", "tensorboard"} <= names


def test_nothing_is_opened_that_nobody_asked_for(tmp_path: Path):
    wanted = plan(tmp_path)
    with closing(Telemetry(wanted, VirtualClock(), NO_FILES)) as told:
        assert told.url is None
        json.dumps(told.snapshot())
    assert list(wanted.output_dir.iterdir()) == []


def test_when_the_port_is_taken_no_file_is_opened(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted = plan(tmp_path, metrics={"port": port, "jsonl": True})
        with pytest.raises(ConfigError, match=rf"metrics\.port.*{port}"):
            Telemetry(wanted, VirtualClock(), NO_FILES)
    assert list(wanted.output_dir.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path):
    wanted = plan(tmp_path, metrics={"jsonl": True})
    (wanted.output_dir / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="metrics cannot be written"):
        Telemetry(wanted, VirtualClock(), NO_FILES)
