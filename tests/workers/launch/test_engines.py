"""Scripts that train several engines, as if they ran once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

from rayzero.workers.messages import Crashed
from tests.workers.launch.support import (
    SCRIPTS,
    PlainRuns,
    make_workers,
    read_notes,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("step", "place"), [(3, "between"), (4, "generator"), (5, "between"), (8, "critic")]
)
def test_script_of_two_engines_goes_on_where_it_is(
    plain_runs: PlainRuns, tmp_path: Path, step: int, place: str
) -> None:
    """Also in the last step of an epoch, whose batch is yielded again before the next begins."""
    undisturbed = plain_runs("gan.py")
    args = ("--out", str(tmp_path), "--kill", str(step), place)
    with closing(make_workers(tmp_path, "gan.py", *args, count=3)) as local:
        local.form(1, [0, 1])
        assert local.wait_lost() == 1
        assert (tmp_path / "killed").exists()
        local.fence(1, [0])
        local.finish(2, [0, 2], local.slots(1, 2))
    expected = read_notes(undisturbed, "weights", 0)
    found = read_notes(tmp_path, "weights", 0)
    assert [_flat(it) for it in found] == [pytest.approx(_flat(it), rel=1e-9) for it in expected]
    assert [len(read_notes(tmp_path, "entries", rank)) for rank in (0, 1)] == [1, 2]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """Runs of the script without rayzero, each once."""

    @cache
    def run(each: bool) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        options = ["--alone", *["--each"] * each, "--out", str(folder)]
        command = [sys.executable, str(SCRIPTS / "accelerated_gan.py"), *options]
        subprocess.run(command, env=os.environ | {"RANK": "0"}, check=True, timeout=240)
        return folder

    return run


@pytest.mark.parametrize(
    ("each", "step", "place"),
    [(False, -1, ""), (False, 3, "between"), (False, 5, "generator"), (True, 8, "between")],
)
def test_gan_with_accelerate_is_plain_torchs(
    alone: Callable[[bool], Path], tmp_path: Path, each: bool, step: int, place: str
) -> None:
    """Its two models, optimizers and a schedule in one call of `prepare`, or in one each."""
    killed = step >= 0
    options = [*["--each"] * each, "--out", str(tmp_path), "--kill", str(step), place]
    with closing(make_workers(tmp_path, "accelerated_gan.py", *options, count=2 + killed)) as local:
        if killed:
            local.form(1, [0, 1])
            assert local.wait_lost() == 1
            assert (tmp_path / "killed").exists()
            local.fence(1, [0])
            local.finish(2, [0, 2], local.slots(1, 2))
        else:
            local.finish(1, [0, 1])
    assert (tmp_path / "killed").exists() is killed
    expected = read_notes(alone(each), "weights", 0)
    found = read_notes(tmp_path, "weights", 0)
    assert [_flat(it) for it in found] == [pytest.approx(_flat(it), rel=1e-9) for it in expected]
    assert len(read_notes(tmp_path, "entries", 0)) == 1, "the survivor stays in its loop"


def test_second_model_is_refused_where_it_would_be_another_ones(tmp_path: Path) -> None:
    """Accelerate puts the last of several models in the place of all, with a DeepSpeed config."""
    args = ("--out", str(tmp_path), "--config")
    with closing(make_workers(tmp_path, "accelerated_gan.py", *args, count=1)) as local:
        local.form(1, [0])
        crash = local.wait_end(0, 1)
    assert isinstance(crash, Crashed)
    assert "accelerator.prepare was called with 2 models and a DeepSpeed config" in crash.error


def _flat(value: object) -> list[float]:
    return [it for part in value for it in _flat(part)] if isinstance(value, list) else [value]
