"""`save_pretrained` by one rank at stage 3, before there is an engine and afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.huggingface.runs import run

SCRIPT = Path(__file__).parent / "unbuilt.py"


@pytest.mark.slow
def test_one_rank_saves_a_model_that_has_no_engine(tmp_path: Path) -> None:
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "rayzero.deepspeed"]
    printed = run([*torchrun, str(SCRIPT), str(tmp_path)])
    assert sorted(it for it in printed.splitlines() if it.startswith("saved")) == [
        "saved 0",
        "saved 1",
    ]
