"""Kinds of training state, and a training run for each of them.

A kind is a config whose state has special parts, which `check_parts` looks for.
`merge_blocks` assembles the ranks' blocks, so that states of different world sizes can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.api.params import GatheredParameters
from tests.engine.checkpoint.saving import read_tensors
from tests.engine.offload.training import separate_host_memory
from tests.engine.state.blocks import Block, BlocksSource

SAMPLES, LENGTH, SEED = 12, 50, 3
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2}}


@dataclass(frozen=True)
class Kind:
    """A kind of training state.

    Attributes:
        stage: initial ZeRO stage.
        target_stage: stage that the state is resharded to and loaded at.
        parts: prefixes of tensors that the state must have, and not only zeros.
        zero: other keys of `zero_optimization`.
        extra: other top-level config keys.
        limit: largest relative error of weights, against an uninterrupted run, after a change of
            the world size; None if compression makes the runs incomparable.
        frozen: two layers are, as a base under LoRA; at step 0 one of them is written.
    """

    stage: int
    target_stage: int
    parts: tuple[str, ...]
    zero: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    limit: float | None = 1e-4
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


TERMS, SUMS = "residual.terms.{rank}/", "residual.sum"
ADAM = ("optimizer.exp_avg/", "optimizer.exp_avg_sq/")
ONE_BIT = _optimizer("OneBitAdam", betas=[0.9, 0.9], freeze_step=2)

KINDS = {
    "loss scale": Kind(2, 3, ADAM, extra=FP16_OVERFLOW, limit=3e-2),
    "fp16 accumulation": Kind(
        1, 2, ADAM, extra=FP16 | {"data_types": {"grad_accum_dtype": "fp16"}}, limit=3e-2
    ),
    "bf16 accumulation, Lion": Kind(
        3,
        0,
        ("optimizer.exp_avg/",),
        extra=BF16 | _optimizer("Lion", lr=1e-3) | {"data_types": {"grad_accum_dtype": "bf16"}},
        limit=3e-2,
    ),
    "bf16 main weights, CPU optimizer": Kind(3, 1, ADAM, zero=CPU, extra=BF16_MAIN, limit=None),
    "sign, CPU optimizer": Kind(
        2, 0, (TERMS, *ADAM), zero=CPU, extra=_compressed("sign"), limit=None
    ),
    "sign, fp16": Kind(0, 1, (TERMS, SUMS), extra=FP16 | _compressed("sign"), limit=None),
    "lowrank, fp16, NVMe": Kind(
        3, 1, (TERMS, "lowrank/"), zero=NVME, extra=FP16 | _compressed("lowrank"), limit=None
    ),
    "1-bit Adam": Kind(0, 0, (TERMS, SUMS, *ADAM), extra=ONE_BIT, limit=None),
    "1-bit Adam, fp16, CPU optimizer": Kind(
        0, 0, (TERMS, SUMS, *ADAM), zero=CPU, extra=FP16 | ONE_BIT, limit=None
    ),
    "partial CPU optimizer, LAMB": Kind(2, 1, ADAM, zero=PARTIAL, extra=_optimizer("Lamb")),
    "NVMe, Adagrad": Kind(1, 3, ("optimizer.sum/",), zero=NVME, extra=_optimizer("Adagrad")),
    "CPU parameters, Muon": Kind(
        3, 2, ("optimizer.momentum_buffer/", *ADAM), zero=CPU | PARAM, extra=_optimizer("Muon")
    ),
    "secondary shards": Kind(3, 2, ADAM, zero={"zero_hpz_partition_size": 2}),
    "frozen weights": Kind(3, 1, ADAM, frozen=True),
    "int8 weights": Kind(3, 3, ADAM, zero={"zero_quantized_weights": True}, limit=2e-2),
}


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
    with separate_host_memory() if "offload_optimizer" in kind.zero else nullcontext():
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


def merge_blocks(blocks: Sequence[Block]) -> FullState:
    factor = json.loads(blocks[0].metadata).get("residual_factor", 1.0)
    tensors: dict[str, Tensor] = {}
    for name, value in read_tensors(BlocksSource(blocks)).items():
        kind, _, param = name.partition("/")
        if kind.startswith("residual."):
            sum_so_far = tensors.get(f"residual/{param}", torch.zeros_like(value))
            tensors[f"residual/{param}"] = sum_so_far + factor * value
        elif not kind.startswith("registered."):  # the host's own
            tensors[name] = value
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


def check_parts(kind: Kind, blocks: Sequence[Block]) -> None:
    """The state has what is special about its kind: the test would show nothing otherwise."""
    tensors = read_tensors(BlocksSource(blocks))
    ranks = range(len(blocks))
    for prefix in {part.format(rank=rank) for part in kind.parts for rank in ranks}:
        assert any(value.any() for name, value in tensors.items() if name.startswith(prefix)), (
            prefix
        )
    metadata = json.loads(blocks[0].metadata)
    if "fp16" in kind.extra:
        scale = metadata["loss_scale"]
        assert scale["value"] not in (2.0**8, 2.0**17)
        assert scale["good_steps"] > 0
        assert (metadata["skipped_steps"] > 0) == (kind.extra == FP16_OVERFLOW)
