"""Memory estimates equal the memory of engines and processes, and live bytes are counted."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rayzero
from examples.gpt.model import GPT, GPTConfig
from rayzero.engine.accounting import FlopCount
from rayzero.engine.config import parse_config
from rayzero.engine.errors import ConfigError
from rayzero.engine.planning.activations import LiveBytes, MicroStepTrace
from rayzero.engine.planning.search import MemoryPlanner, evaluate_settings, first_fit
from tests.engine.offload.training import separate_host_memory
from tests.support.covering import covering
from tests.support.ranks import run_ranks

SMALL = GPTConfig(vocab=96, context=16, layers=3, width=64, heads=2)
LARGE = GPTConfig(vocab=2048, context=256, layers=4, width=256, heads=4)


def config(stage: int, **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    } | others


def small() -> nn.Module:
    return GPT(SMALL)


def batch(samples: int, shape: GPTConfig = SMALL) -> tuple[Tensor, Tensor]:
    return tuple(torch.randint(0, shape.vocab, (samples, shape.context)) for _ in range(2))


def engine_bytes(rank: int, world: int, document: dict[str, Any]) -> dict[str, int]:
    """Bytes that an engine has allocated after three steps."""
    with separate_host_memory(streams=True):
        engine, *_ = rayzero.initialize(model=small(), config=document)
        for _ in range(3 * engine.settings.batches.micro_steps):
            engine.backward(engine(*batch(2)))
            engine.step()
        return engine.metrics.bytes


TRANSIENT = ("grad_copies", "unit_grads")


def check_plan(world: int, document: dict[str, Any]) -> None:
    """Compare the estimate with the rank that uses most memory, by class and to the byte."""
    planned = MemoryPlanner(small).estimate(parse_config(document), world).bytes
    ranks = run_ranks(world, engine_bytes, document)
    largest = max(ranks, key=lambda sizes: sum(sizes.values()))
    assert {name: size for name, size in planned.items() if not name.endswith(TRANSIENT)} == {
        name: size for name, size in largest.items() if size
    }


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}  # no step is skipped


PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": BF16, "fp16": FP16}
AXES = {"world": (1, 2, 3), "stage": (0, 1, 2, 3), "precision": tuple(PRECISIONS)}


@pytest.mark.parametrize(
    tuple(AXES), [tuple(row[axis] for axis in AXES) for row in covering(AXES, 2)]
)
def test_estimate_equals_engine_allocations(world: int, stage: int, precision: str) -> None:
    check_plan(world, config(stage, **PRECISIONS[precision]))


HPZ = {"zero_hpz_partition_size": 2}
INT8 = {"zero_quantized_weights": True}
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}}


def compressed(name: str, **more: Any) -> dict[str, Any]:
    return {"rayzero": {"compression": {"gradients": name, "rank": 2}}} | more


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage} | more}


CPU = {"device": "cpu"}
FILES = {"device": "nvme", "nvme_path": "the test's", "buffer_count": 3}


BF16_MAIN = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
BF16_STATES = {"bf16": BF16_MAIN["bf16"] | {"bf16_optimizer_states": True}}

# (world, config)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "hpz": (4, zero(3, **HPZ)),
    "int8 weights": (2, zero(3, **INT8)),
    "hpz of int8 in bf16": (4, zero(3, **HPZ, **INT8) | BF16),
    "sign, replicated": (2, compressed("sign", **zero(0))),
    "sign, state sharded": (2, compressed("sign", **zero(1))),
    "sign, sharded": (3, compressed("sign", **zero(3), **BF16)),
    "sign, no overlap": (2, compressed("sign", **zero(1, overlap_comm=False))),
    "lowrank": (2, compressed("lowrank", **zero(2))),
    "int8 gradients": (2, zero(2, zero_quantized_gradients=True)),
    "1-bit Adam": (2, {"optimizer": ONE_BIT, "gradient_clipping": 0} | zero(0)),
    "sums in bf16": (2, zero(2) | BF16 | {"data_types": {"grad_accum_dtype": "bf16"}}),
    "bf16 throughout": (2, zero(2) | BF16_STATES),
    "bf16 main weights": (2, zero(3, offload_optimizer=CPU) | BF16_MAIN),
    "Muon": (2, {"optimizer": {"type": "Muon"}} | zero(2)),
    "Lion": (1, {"optimizer": {"type": "Lion"}} | zero(0)),
    "half on the CPU": (2, zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5})),
    "on the CPU, one rank": (1, zero(2, offload_optimizer=CPU)),
    "on the CPU, accumulated": (
        2,
        zero(2, offload_optimizer=CPU) | {"gradient_accumulation_steps": 2},
    ),
    "all on the CPU": (2, zero(3, offload_optimizer=CPU, offload_param=CPU) | BF16),
    "sums at the end of a step": (
        2,
        zero(3) | {"rayzero": {"reduce_each_micro_step": False}, "gradient_accumulation_steps": 2},
    ),
    "parts, accumulated": (
        2,
        zero(3, reduce_bucket_size=2000) | {"gradient_accumulation_steps": 3},
    ),
    "parts in host memory": (3, zero(2, reduce_bucket_size=2000, offload_optimizer=CPU)),
    "in files": (2, zero(3, sub_group_size=4096, offload_optimizer=dict(FILES)) | BF16),
    "in files, weights on the CPU": (
        2,
        zero(3, offload_optimizer=dict(FILES), offload_param=CPU) | FP16,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_estimate_with_compression_and_offload(name: str, tmp_path: Path) -> None:
    world, more = CASES[name]
    document = config(0) | more
    offload = document["zero_optimization"].get("offload_optimizer", {})
    if "nvme_path" in offload:
        offload["nvme_path"] = str(tmp_path)
    check_plan(world, document)


def test_unsupported_settings_are_excluded() -> None:
    document = config(0, optimizer=ONE_BIT, gradient_clipping=0)
    evaluations = evaluate_settings(MemoryPlanner(small), document, 2)
    assert [evaluation.setting.name for evaluation in evaluations] == ["stage 0"]
    evaluations = evaluate_settings(MemoryPlanner(small), config(3, **zero(3, **INT8)), 2)
    staged = [e.setting.stage for e in evaluations if e.estimate.device_bytes.get("staging")]
    assert staged == [3, 3, 3]


# One interpreter imports, and forks a process per case.
SCRIPT = """
import os, sys, torch, torch._dynamo  # every optimizer would import it
from tests.engine.planning.test_search import LARGE, PEAKS, SMALL, batch, config
from examples.gpt.model import GPT
import rayzero

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

def steps(shape, count, more):
    engine, *_ = rayzero.initialize(model=GPT(shape), config=config(0, **more))
    for _ in range(count):
        engine.backward(engine(*batch(2, shape)))
        engine.step()

torch.set_num_threads(1)
torch.backends.mkldnn.set_flags(False)  # its bf16 kernels have memory that torch does not count
for name, more in PEAKS.items():
    child = os.fork()
    if not child:
        steps(SMALL, 2, more)
        open("/proc/self/clear_refs", "w").write("5")
        before = status("VmRSS")
        steps(LARGE, 2, more)
        print(f"{name}={status('VmHWM') - before}")
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} failed")
"""


CPU_BUCKETS = {"zero_optimization": {"stage": 0, "reduce_bucket_size": 500_000}}  # not a GPU's
PEAKS: dict[str, dict[str, Any]] = {
    "fp32": CPU_BUCKETS,
    "bf16": BF16 | CPU_BUCKETS,
    "sums in bf16": {"data_types": {"grad_accum_dtype": "bf16"}} | CPU_BUCKETS,
    "sign": compressed("sign") | CPU_BUCKETS,
}


@cache
def measure_peaks() -> dict[str, int]:
    """Bytes that training in each case of PEAKS adds to a process."""
    # Make malloc return freed memory to the system.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    pairs = (line.split("=") for line in run.stdout.splitlines() if "=" in line)
    return {name: int(peak) for name, peak in pairs}


@pytest.mark.slow
@pytest.mark.parametrize("precision", PEAKS)
def test_process_peak_equals_estimate(precision: str):
    document = config(0) | PEAKS[precision]
    planner = MemoryPlanner(lambda: GPT(LARGE), lambda samples: batch(samples, LARGE))
    planned = planner.estimate(parse_config(document), 1).device_total_bytes
    assert planned == pytest.approx(measure_peaks()[precision], rel=0.04)


def test_activation_checkpointing_trades_flops_for_memory():
    planner = MemoryPlanner(lambda: GPT(LARGE), lambda samples: batch(samples, LARGE))
    parsed = parse_config(config(0, train_micro_batch_size_per_gpu=4))
    saved = planner.estimate(parsed, 1)
    recomputed = planner.estimate(parsed, 1, recomputed=True)
    assert recomputed.device_bytes["activations"] < 0.7 * saved.device_bytes["activations"]
    assert 1.1 < recomputed.flops / saved.flops < 1.4


def test_first_fit():
    planner = MemoryPlanner(small)
    evaluations = evaluate_settings(planner, config(0), 2, gpu_bytes=2**40)
    choice = first_fit(evaluations)
    assert choice is not None
    assert choice.setting.name == "stage 0"
    needs = [evaluation.estimate.device_total_bytes for evaluation in evaluations]
    third = evaluate_settings(planner, config(0), 2, gpu_bytes=int(needs[2] / 0.9) + 8)
    choice = first_fit(third)
    assert choice is not None
    assert choice.estimate.device_total_bytes <= needs[2]
    assert not third[0].fits
    assert first_fit(evaluate_settings(planner, config(0), 2, gpu_bytes=10)) is None


class ValueDependentModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).sum()
        return y if y.item() > 0 else -y


def test_value_dependent_model_is_an_error():
    planner = MemoryPlanner(ValueDependentModel, lambda samples: torch.ones(samples, 4))
    with pytest.raises(ConfigError, match="cannot be traced without data"):
        planner.estimate(parse_config(config(0)), 1)


def test_freed_storages_and_views_do_not_count():
    with LiveBytes([]) as live:
        a = torch.zeros(256)  # 1024 bytes
        b = a.view(16, 16)[1:]
        assert (live.live_bytes, live.peak_bytes) == (1024, 1024)
        c = a + 1
        del c
        assert (live.live_bytes, live.peak_bytes) == (1024, 2048)
        del a
        assert live.live_bytes == 1024, "a view keeps its storage"
        del b
        assert live.live_bytes == 0


def test_excluded_tensors_and_in_place_operations_do_not_count():
    excluded = torch.zeros(256)
    with LiveBytes([excluded]) as live:
        excluded.add_(1)
        excluded.view(2, 128).mul_(2)
    assert live.peak_bytes == 0


def test_saved_tensors_count_until_backward():
    layer = nn.Linear(256, 256, bias=False)
    x = torch.ones(4, 256)
    with LiveBytes([layer.weight, x]) as live:
        y = layer(x).relu()
        assert live.live_bytes == 4 * 256 * 4  # the output of relu, which is what it saves
        loss = y.sum()
        del y
        loss.backward()
        layer.weight.grad = None
        del loss
        assert live.live_bytes == 0
        assert live.peak_bytes >= 256 * 256 * 4, "includes the weight's gradient"


def test_flop_count_holds_nothing_that_checkpointing_recomputes():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8))
    known = [*layers.parameters()]

    def peak(*, counted: bool) -> int:
        x = torch.ones(256, 64, requires_grad=True)
        with LiveBytes([*known, x]) as live, FlopCount() if counted else nullcontext():
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False)
            x.sum().backward()
        return live.peak_bytes

    assert peak(counted=True) == peak(counted=False)


def test_gradients_are_held_until_their_unit_can_be_reduced():
    trace = MicroStepTrace(
        flops=0, grads=(("b", 100), ("a", 60), ("b", 10), ("c", 30), ("d", 20)), last_bytes=5
    )
    assert trace.activation_bytes == 100
    assert trace.held_grad_bytes([{"a": 1, "b": 50}, {"c": 1, "d": 1}]) == 10, "a's peak, with b's"
    assert trace.held_grad_bytes([{"d": 1, "c": 1}, {"a": 1, "b": 50}]) == 10
    assert trace.held_grad_bytes([{"d": 90, "c": 90}, {"a": 1, "b": 50}]) == 61, "units in order"
    assert trace.held_grad_bytes([{"b": 50}, {"a": 1}, {"c": 1}, {"d": 1}]) == 0
    assert trace.held_grad_bytes([{"b": 50, "unused": 9}, {"a": 50, "c": 40, "d": 1}]) == 60
