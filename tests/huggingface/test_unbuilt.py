"""`save_pretrained` by one rank at stage 3, before there is an engine and afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import run_script

SCRIPT = Path(__file__).parent / "unbuilt.py"


@pytest.mark.slow
def test_one_rank_saves_a_model_that_has_no_engine(tmp_path: Path) -> None:
    done = run_script("-m", "rayzero.deepspeed", str(SCRIPT), str(tmp_path), ranks=2)
    assert done.returncode == 0, done.stderr
    assert sorted(it for it in done.stdout.splitlines() if it.startswith("saved")) == [
        "saved 0",
        "saved 1",
    ]
