"""Kinds of training state, and a training run for each of them.

A kind is a config whose state has special parts; `CHECKS` has a predicate for each part.
`merge_blocks` assembles the ranks' blocks, so that states of different world sizes can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.api.params import GatheredParameters
from rayzero.engine.layout.state_index import TensorRange
from rayzero.engine.offload import plan
from rayzero.engine.offload.transfer import HostTransfer
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME
from tests.engine.state.blocks import Block

SAMPLES, LENGTH, SEED = 12, 50, 3
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2}}


@dataclass(frozen=True)
class Kind:
    """A kind of training state.

    Attributes:
        stage: initial ZeRO stage.
        target_stage: stage that the state is resharded to and loaded at.
        checks: keys of `CHECKS` that the state must pass.
        zero: other keys of `zero_optimization`.
        extra: other top-level config keys.
        limit: largest relative error of weights, against an uninterrupted run, after a change of
            the world size; None if compression makes the runs incomparable.
        separate_memory: copy between device and host memory, as on a GPU.
        frozen: two layers are, as a base under LoRA; at step 0 one of them is written.
    """

    stage: int
    target_stage: int
    checks: tuple[str, ...]
    zero: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    limit: float | None = 1e-4
    separate_memory: bool = False
    frozen: bool = False

    def config(self, stage: int, nvme_path: str) -> dict[str, Any]:
        zero = {"reduce_bucket_size": 200, "sub_group_size": 64} | dict(self.zero)
        if zero.get("offload_optimizer", {}).get("device") == "nvme":
            zero["offload_optimizer"] = zero["offload_optimizer"] | {"nvme_path": nvme_path}
        if stage < 3:
            zero = {key: value for key, value in zero.items() if key not in STAGE_3_KEYS}
        return {
            "train_batch_size": SAMPLES,
            "optimizer": ADAMW,
            "gradient_clipping": 0,
            "zero_optimization": zero | {"stage": stage},
        } | dict(self.extra)


STAGE_3_KEYS = {"offload_param", "zero_hpz_partition_size", "zero_quantized_weights"}
BF16 = {"bf16": {"enabled": True}}
BF16_MAIN = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
# The loss scale grows every third step, and nothing overflows.
FP16 = {
    "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 8, "loss_scale_window": 2}
}
# The loss scale shrinks first: the scaled loss overflows fp16 above a scale of 32768.
FP16_OVERFLOW = {
    "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 17, "hysteresis": 1}
}
CPU = {"offload_optimizer": {"device": "cpu"}}
PARTIAL = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
NVME = {"offload_optimizer": {"device": "nvme", "buffer_count": 2}}
PARAM = {"offload_param": {"device": "cpu"}}


def _optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-2} | params}}


def _compressed(name: str) -> dict[str, Any]:
    return {"rayzero": {"compression": {"gradients": name, "block_size": 32, "rank": 1}}}


ONE_BIT = _optimizer("OneBitAdam", betas=[0.9, 0.9], freeze_step=2)

KINDS = {
    "loss scale": Kind(2, 3, ("scale", "skipped", "adam"), extra=FP16_OVERFLOW, limit=3e-2),
    "fp16 accumulation": Kind(
        1,
        2,
        ("scale", "adam"),
        extra=FP16 | {"data_types": {"grad_accum_dtype": "fp16"}},
        limit=3e-2,
    ),
    "bf16 accumulation, Lion": Kind(
        3,
        0,
        ("lion",),
        extra=BF16 | _optimizer("Lion", lr=1e-3) | {"data_types": {"grad_accum_dtype": "bf16"}},
        limit=3e-2,
    ),
    "bf16 main weights, CPU optimizer": Kind(
        3, 1, ("adam",), zero=CPU, extra=BF16_MAIN, limit=None, separate_memory=True
    ),
    "sign, CPU optimizer": Kind(
        2,
        0,
        ("terms", "adam"),
        zero=CPU,
        extra=_compressed("sign"),
        limit=None,
        separate_memory=True,
    ),
    "sign, fp16": Kind(
        0, 1, ("terms", "sums", "scale"), extra=FP16 | _compressed("sign"), limit=None
    ),
    "lowrank, fp16, NVMe": Kind(
        3,
        1,
        ("terms", "basis", "scale"),
        zero=NVME,
        extra=FP16 | _compressed("lowrank"),
        limit=None,
        separate_memory=True,
    ),
    "1-bit Adam": Kind(0, 0, ("terms", "sums", "momenta"), extra=ONE_BIT, limit=None),
    "1-bit Adam, fp16, CPU optimizer": Kind(
        0,
        0,
        ("terms", "sums", "momenta", "scale"),
        zero=CPU,
        extra=FP16 | ONE_BIT,
        limit=None,
        separate_memory=True,
    ),
    "partial CPU optimizer, LAMB": Kind(
        2, 1, ("adam",), zero=PARTIAL, extra=_optimizer("Lamb"), separate_memory=True
    ),
    "NVMe, Adagrad": Kind(1, 3, ("adagrad",), zero=NVME, extra=_optimizer("Adagrad")),
    "CPU parameters, Muon": Kind(
        3, 2, ("momentum", "adam"), zero=CPU | PARAM, extra=_optimizer("Muon"), separate_memory=True
    ),
    "secondary shards": Kind(3, 2, ("adam",), zero={"zero_hpz_partition_size": 2}),
    "frozen weights": Kind(3, 1, ("adam",), frozen=True),
    "int8 weights": Kind(3, 3, ("adam",), zero={"zero_quantized_weights": True}, limit=2e-2),
}


@contextmanager
def host_memory(kind: Kind) -> Iterator[None]:
    """Separate host memory, if the kind has it."""
    original = plan.make_transfer
    if kind.separate_memory:
        plan.make_transfer = lambda device: HostTransfer(separate_memory=True)
    try:
        yield
    finally:
        plan.make_transfer = original


class RegressionDataset:
    """Samples that depend only on the index."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1).sin()


def make_engine(kind: Kind, config: dict[str, Any] | None) -> tuple[rayzero.Engine, Any]:
    """An engine and its loader, resumed from the session's state if it has one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 1)
    )
    if kind.frozen:
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
    with host_memory(kind):
        engine, _, loader, _ = rayzero.initialize(
            model=model, training_data=RegressionDataset(), config=config
        )
    if kind.frozen and engine.progress.step == 0:  # one that resumes reads this from the state
        with GatheredParameters([model[2].weight], modifier_rank=0):
            model[2].weight.data.mul_(1.5)
    return engine, loader


def train_until(engine: rayzero.Engine, loader: Any, end_step: int) -> None:
    for x, y in loader.steps(end_step - engine.progress.step):
        engine.backward(nn.functional.mse_loss(engine(x).float(), y))
        engine.step()


@dataclass
class FullState:
    """An unsharded state.

    Attributes:
        tensors: by name; the residuals of a parameter are summed, as `residual/<parameter>`.
        metadata: without what is specific to a rank or depends on the world size.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


Check = Callable[[Sequence[Block], FullState], bool]


def merge_blocks(blocks: Sequence[Block]) -> FullState:
    tensors: dict[str, Tensor] = {}
    for block in blocks:
        factor = json.loads(block.metadata).get("residual_factor", 1.0)
        for part in block.index.ranges:
            if part.name.startswith("registered."):  # the host's own
                continue
            logical = block.index.tensors[part.name]
            is_residual = part.name.startswith("residual.")
            name = f"residual/{part.name.partition('/')[2]}" if is_residual else part.name
            values = _read_range(block, part, DTYPE_BY_NAME[logical.dtype])
            target = tensors.setdefault(name, torch.zeros(logical.numel, dtype=values.dtype))
            target[part.start : part.stop] += factor * values if is_residual else values
    documents = [json.loads(block.metadata) for block in blocks]
    keys = ("step", "sample_cursor", "skipped_steps", "loss_scale")
    metadata = {key: documents[0][key] for key in keys}
    groups_by_rank = zip(*(document["groups"] for document in documents), strict=True)
    # A rank without parameters of a group has no scalars of it.
    metadata["scalars"] = [
        next((group["scalars"] for group in groups if "scalars" in group), None)
        for groups in groups_by_rank
    ]
    return FullState(tensors, metadata)


def _read_range(block: Block, part: TensorRange, dtype: torch.dtype) -> Tensor:
    count = part.stop - part.start
    return torch.frombuffer(block.data, dtype=dtype, count=count, offset=part.offset)


def _has_tensors(*keys: str) -> Check:
    """Whether the state has nonzero tensors under all keys."""

    def check(_: Sequence[Block], state: FullState) -> bool:
        nonzero = dict.fromkeys(keys, False)
        for name, tensor in state.tensors.items():
            key = name.partition("/")[0]
            if key in nonzero:
                nonzero[key] |= bool(tensor.abs().max() > 0)
        return all(nonzero.values())

    return check


def _has_ranges(prefix: str) -> Check:
    """Whether every rank has nonzero ranges with that prefix."""

    def check(blocks: Sequence[Block], _: FullState) -> bool:
        for block in blocks:
            ranges = [part for part in block.index.ranges if part.name.startswith(prefix)]
            values = [_read_range(block, part, torch.float32) for part in ranges]
            if not any(bool(value.abs().max() > 0) for value in values):
                return False
        return True

    return check


def _loss_scale_changed(_: Sequence[Block], state: FullState) -> bool:
    scale = state.metadata["loss_scale"]
    return scale["value"] not in (2.0**8, 2.0**17) and scale["good_steps"] > 0


CHECKS: dict[str, Check] = {
    "scale": _loss_scale_changed,
    "skipped": lambda _, state: state.metadata["skipped_steps"] > 0,
    "adam": _has_tensors("optimizer.exp_avg", "optimizer.exp_avg_sq"),
    "momenta": _has_tensors("optimizer.exp_avg", "optimizer.exp_avg_sq"),
    "lion": _has_tensors("optimizer.exp_avg"),
    "momentum": _has_tensors("optimizer.momentum_buffer"),
    "adagrad": _has_tensors("optimizer.sum"),
    "terms": _has_ranges("residual.terms."),
    "sums": _has_ranges("residual.sum"),
    "basis": _has_tensors("lowrank"),
}


def assert_states_equal(actual: FullState, expected: FullState, *, exact_residuals: bool) -> None:
    """Compare two states bit by bit.

    Args:
        exact_residuals: if False, residuals may differ by the rounding of their sums.
    """
    assert actual.metadata == expected.metadata
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        if exact_residuals or not name.startswith("residual/"):
            assert torch.equal(actual.tensors[name], value), name
        else:
            torch.testing.assert_close(actual.tensors[name], value, rtol=1e-5, atol=1e-7)
