"""`import deepspeed` resolves to rayzero: unchanged scripts, submodules, unsupported names."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepspeed.scripts import plain
from tests.support.scripts import run_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/deepspeed/scripts/with_args.py"
SGD = {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}


def run(*command: str, ranks: int = 0, ok: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` in a forked process, or in one per rank."""
    done = run_script(*command, ranks=ranks)
    assert (done.returncode == 0) is ok, done.stderr[-3000:]
    return done


INSTALL = "import rayzero.deepspeed; rayzero.deepspeed.install()\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    document: dict[str, Any] = {
        "train_batch_size": 12,
        "steps_per_print": 3,
        "gradient_clipping": 0,
        "optimizer": SGD,
        "zero_optimization": {"stage": 2},
    }
    path.write_text(json.dumps(document))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "ranks"), [("config", 2), ("args", 0), ("defaults", 2)])
def test_tutorial_loops_run_unchanged(loop: str, ranks: int, config: Path) -> None:
    """tests/huggingface/test_scripts.py starts a real torchrun."""
    script = ("-m", "rayzero.deepspeed", str(SCRIPT), "--loop", loop)
    done = run(*script, "--deepspeed_config", str(config), ranks=ranks)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert ("step 3: loss" in done.stderr) is (loop != "defaults")  # enabled by the config
    if loop == "defaults":
        expected = plain.train(lambda params: torch.optim.AdamW(params, lr=1e-3), clip=1.0)
        assert "AdamW with a learning rate of 1e-3" in done.stderr
    else:
        expected = plain.train(lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))
    assert result["losses"] == pytest.approx(expected, rel=1e-4)
    assert done.stderr.count("means rayzero's engine") == 1


COMMON_IMPORTS = """
import deepspeed, torch
import deepspeed.comm as dist
from deepspeed import DeepSpeedEngine, comm, get_accelerator, log_dist, zero
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import RepeatingLoader, logger, safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
assert deepspeed.ops.adam.FusedAdam is FusedAdam
assert deepspeed.zero.GatheredParameters is GatheredParameters is zero.GatheredParameters
assert deepspeed.checkpointing.checkpoint is checkpoint
assert comm.get_world_size() == 1 and dist.ReduceOp is torch.distributed.ReduceOp
assert get_accelerator().device_name() == "cpu"
assert get_accelerator().communication_backend_name() == "gloo"
model = torch.nn.Linear(3, 1)
optimizer = FusedAdam(model.parameters(), lr=0.1)
schedule = WarmupLR(optimizer, warmup_num_steps=3)
arguments = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule, "config": {}}
engine, *_ = deepspeed.initialize(**arguments)
assert isinstance(engine, DeepSpeedEngine) and engine.lr_scheduler is schedule
engine.backward(engine(torch.ones(2, 3)).mean()); engine.step()
assert dist.get_rank() == 0 and torch.distributed.is_initialized()
loader = iter(RepeatingLoader([1, 2]))
assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
log_dist("logged by rank 0", ranks=[0]); log_dist("logged by rank 1", ranks=[1])
log_dist("logged by no rank"); log_dist("logged by all ranks", ranks=[-1])
rayzero.deepspeed.install()
print("ok")
"""


@pytest.mark.slow
def test_common_imports() -> None:
    done = run("-c", f"{INSTALL}{COMMON_IMPORTS}")
    assert done.stdout == "ok\n"
    assert "[Rank 0] logged by rank 0" in done.stderr
    assert "[Rank 0] logged by all ranks" in done.stderr
    assert "logged by rank 1" not in done.stderr
    assert "logged by no rank" not in done.stderr


UNSUPPORTED = {
    "from deepspeed.moe.layer import MoE; MoE(8)": "deepspeed.moe.layer.MoE is not part of rayzero",
    "from deepspeed.pipe import LayerSpec; LayerSpec(int)": "deepspeed.pipe.LayerSpec is not part",
    "from deepspeed.ops.missing import X": "rayzero has no deepspeed.ops.missing",
    "import deepspeed; deepspeed.PipelineModule.forward": "use stage 3",
    "import deepspeed; deepspeed.initialise": "did you mean 'initialize'?",
    "import deepspeed; deepspeed.get_accelerator().create_op_builder": "no kernels to compile",
    "import deepspeed.comm; deepspeed.comm.get_rnk": "'get_rank'",
}


@pytest.mark.slow
def test_unsupported_names_raise_helpful_errors() -> None:
    code = (
        "import json\nerrors = {}\n"
        f"for code in {list(UNSUPPORTED)!r}:\n"
        "    try:\n        exec(code)\n"
        "    except (ImportError, AttributeError, ValueError) as error:\n"
        "        errors[code] = str(error)\n"
        "print(json.dumps(errors))"
    )
    errors = json.loads(run("-c", f"{INSTALL}{code}").stdout)
    for line, part in UNSUPPORTED.items():
        assert part in errors[line], line


@pytest.mark.slow
def test_mistakes_of_the_start() -> None:
    code = (
        "import sys, types, rayzero.deepspeed as d\n"
        "sys.modules['deepspeed'] = types.ModuleType('deepspeed')\n"
        "d.install()"
    )
    assert "was imported before" in run("-c", code, ok=False).stderr
    assert "usage: " in run("-m", "rayzero.deepspeed", "--help").stdout
    for arguments in ((), ("missing.py",)):
        done = run("-m", "rayzero.deepspeed", *arguments, ok=False)
        assert done.returncode == 2
        assert "usage: " in done.stderr
