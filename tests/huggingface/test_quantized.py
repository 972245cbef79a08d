"""QLoRA over bitsandbytes and torchao, where they are installed: neither is in the dev extra.

The mechanism is tested without them in tests/engine/zero/test_packed.py.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.huggingface.runs import run

SCRIPT = Path(__file__).parent / "quantized.py"
KINDS = {
    "bitsandbytes": ["bitsandbytes-4bit", "bitsandbytes-4bit-bf16-storage", "bitsandbytes-8bit"],
    "torchao": ["torchao-8bit"],
}


@pytest.mark.slow
@pytest.mark.parametrize("package", KINDS)
def test_trainer_over_a_quantized_base_equals_plain_torch(package: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "rayzero.deepspeed"]
    run([*torchrun, str(SCRIPT), str(tmp_path), *KINDS[package]])
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    for kind, stages in results.items():
        assert len(stages) == 4, kind
        for stage, result in enumerate(stages):
            assert result["losses"] < 1e-5, (kind, stage)
            assert result["adapters"] < 1e-5, (kind, stage)
        sharded = stages[3]["bytes_outside_units"] < 0.5 * stages[2]["bytes_outside_units"]
        assert sharded == ("4bit" in kind)
