"""What a launched script does after the loop over an epoch that was finished before the ranks
changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayzero.workers.messages import Finished, StepReport, Stopped
from tests.workers.launch.test_script import make_workers

FINISHED_EPOCHS = 2  # before the script is drained


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """The script's folder, and the files in it when the script was drained."""
    folder = tmp_path_factory.mktemp("ends")
    local = make_workers(folder, "epoch_ends.py", str(folder), count=1)
    try:
        local.form(1, [0])
        local.wait(0, lambda message: isinstance(message, StepReport) and message.step == 12)
        local.workers[0].call("drain", 1)
        files = {file.name: file.read_bytes() for file in folder.glob("*.pt")}
        (folder / "drained").touch()
        assert isinstance(local.wait_end(0, 1), Stopped)
        local.form(2, [0], local.slots(1, 1))
        assert isinstance(local.wait_end(0, 2), Finished), local.texts(0)
    finally:
        local.close()
    assert len(files) == 2 * FINISHED_EPOCHS
    return folder, files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["half", "plain"])
def test_files_of_finished_epochs_are_kept(
    resized: tuple[Path, dict[str, bytes]], name: str
) -> None:
    folder, files = resized
    assert len(list(folder.glob(f"{name}-*.pt"))) == 4
    for file, content in files.items():
        if file.startswith(name):
            assert (folder / file).read_bytes() == content, file


@pytest.mark.slow
@pytest.mark.parametrize("name", ["last", "mean"])
def test_each_epoch_tells_its_loss_once(resized: tuple[Path, dict[str, bytes]], name: str) -> None:
    lines = [json.loads(line) for line in (resized[0] / "told").read_text().splitlines()]
    assert [epoch for epoch, told in lines if name in told] == [0, 1, 2, 3]
    assert [told for _, told in lines if "error" in told] == []
