"""The step-time benchmark: ratios, loss comparison, and a short run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import step_time
from benchmarks.step_time import Measurement, find_diverging, make_rows
from tests.support.processes import start_forked


def test_ratios_are_relative_to_ddp_in_the_same_round() -> None:
    seconds = {"ddp": [1.0, 2.0, 4.0], "fsdp2": [2.0, 3.0, 4.0]}
    measurement = Measurement(seconds, {"ddp": 1.0, "fsdp2": 1.0}, peak_bytes=0)
    ddp, fsdp2 = make_rows(measurement, peak_bytes={"fsdp2": 7})
    assert (ddp.ratio, ddp.paired_ratio, ddp.peak_bytes) == (1.0, 1.0, None)
    assert (fsdp2.median_s, fsdp2.min_s, fsdp2.ratio) == (3.0, 2.0, 1.5)
    assert (fsdp2.paired_ratio, fsdp2.peak_bytes) == (1.5, 7)


@pytest.mark.parametrize(("loss", "agrees"), [(5.004, True), (5.006, False), (math.nan, False)])
def test_system_with_diverging_loss_is_reported(loss: float, agrees: bool) -> None:
    assert find_diverging({"ddp": 5.0, "rayzero-1": loss}) == ([] if agrees else ["rayzero-1"])


@pytest.mark.slow
def test_all_stages_agree_with_ddp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_time.mp, "spawn", start_forked)
    path = tmp_path / "step_time.json"
    systems = "ddp,fsdp2,rayzero-0,rayzero-1,rayzero-2,rayzero-3"
    options = ["--layers", "2", "--width", "128", "--rounds", "2", "--warmup", "1"]
    code = step_time.main(["--systems", systems, *options, "--json", str(path)])
    output = capsys.readouterr().out
    assert code == 0, output
    assert "agree with ddp's" in output
    assert [row["system"] for row in json.loads(path.read_text())["rows"]] == systems.split(",")
