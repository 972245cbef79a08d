"""Every kind of training state, one row each, and a training run for any of them.

A row is a config whose state has something of its own; `FOUND` says how one sees that it is there.
`whole` puts a state together from the ranks' blocks, so that states of any two worlds compare.
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
from rayzero.engine.offload import plan
from rayzero.engine.offload.transfer import HostTransfer
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME
from tests.engine.state.blocks import Block

SAMPLES, LENGTH, SEED = 12, 50, 3
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2}}


@dataclass(frozen=True)
class Kind:
    """One row.

    Attributes:
        stage: where it begins; `then` is the stage it is resharded and loaded to.
        zero: the rest of `zero_optimization`.
        more: the rest of the config.
        holds: what the state must hold, and not as it began: keys of `FOUND`.
        limit: how far, relative, weights may be from an undisturbed run's when the world changes;
            None where compression makes it another run.
        apart: host memory is apart from the device's.
    """

    stage: int
    then: int
    holds: tuple[str, ...]
    zero: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    limit: float | None = 1e-4
    apart: bool = False

    def config(self, stage: int, nvme_path: str) -> dict[str, Any]:
        zero = {"reduce_bucket_size": 200, "sub_group_size": 64} | dict(self.zero)
        if zero.get("offload_optimizer", {}).get("device") == "nvme":
            zero["offload_optimizer"] = zero["offload_optimizer"] | {"nvme_path": nvme_path}
        if stage < 3:
            zero = {key: one for key, one in zero.items() if key not in STAGE_3}
        return {
            "train_batch_size": SAMPLES,
            "optimizer": ADAMW,
            "gradient_clipping": 0,
            "zero_optimization": zero | {"stage": stage},
        } | dict(self.more)


STAGE_3 = {"offload_param", "zero_hpz_partition_size", "zero_quantized_weights"}
BF16 = {"bf16": {"enabled": True}}
# The scale rises every third step, and nothing overflows.
FP16 = {
    "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 8, "loss_scale_window": 2}
}
# It falls first, because a 16-bit loss holds no scale above 32768.
FALLS = {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 17, "hysteresis": 1}}
CPU = {"offload_optimizer": {"device": "cpu"}}
HALF = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
NVME = {"offload_optimizer": {"device": "nvme", "buffer_count": 2}}
PARAM = {"offload_param": {"device": "cpu"}}


def _optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-2} | params}}


def _compressed(name: str) -> dict[str, Any]:
    return {"rayzero": {"compression": {"gradients": name, "block_size": 32, "rank": 1}}}


ONE_BIT = _optimizer("OneBitAdam", betas=[0.9, 0.9], freeze_step=2)

KINDS = {
    "loss scale": Kind(2, 3, ("scale", "skipped", "adam"), more=FALLS, limit=3e-2),
    "sums in fp16": Kind(
        1,
        2,
        ("scale", "adam"),
        more=FP16 | {"data_types": {"grad_accum_dtype": "fp16"}},
        limit=3e-2,
    ),
    "sums in bf16, Lion": Kind(
        3,
        0,
        ("lion",),
        more=BF16 | _optimizer("Lion", lr=1e-3) | {"data_types": {"grad_accum_dtype": "bf16"}},
        limit=3e-2,
    ),
    "sign, optimizer on the CPU": Kind(
        2, 0, ("terms", "adam"), zero=CPU, more=_compressed("sign"), limit=None, apart=True
    ),
    "sign, fp16": Kind(
        0, 1, ("terms", "sums", "scale"), more=FP16 | _compressed("sign"), limit=None
    ),
    "lowrank, fp16, in files": Kind(
        3,
        1,
        ("terms", "basis", "scale"),
        zero=NVME,
        more=FP16 | _compressed("lowrank"),
        limit=None,
        apart=True,
    ),
    "1-bit Adam": Kind(0, 0, ("terms", "sums", "momenta"), more=ONE_BIT, limit=None),
    "1-bit Adam, fp16, optimizer on the CPU": Kind(
        0,
        0,
        ("terms", "sums", "momenta", "scale"),
        zero=CPU,
        more=FP16 | ONE_BIT,
        limit=None,
        apart=True,
    ),
    "half of the optimizer on the CPU, LAMB": Kind(
        2, 1, ("adam",), zero=HALF, more=_optimizer("Lamb"), apart=True
    ),
    "in files, Adagrad": Kind(1, 3, ("adagrad",), zero=NVME, more=_optimizer("Adagrad")),
    "parameters on the CPU, Muon": Kind(
        3, 2, ("momentum", "adam"), zero=CPU | PARAM, more=_optimizer("Muon"), apart=True
    ),
    "second shards": Kind(3, 2, ("adam",), zero={"zero_hpz_partition_size": 2}),
    "int8 weights": Kind(3, 3, ("adam",), zero={"zero_quantized_weights": True}, limit=2e-2),
}


@contextmanager
def memory(kind: Kind) -> Iterator[None]:
    """Host memory as the row has it."""
    found = plan.make_transfer
    if kind.apart:
        plan.make_transfer = lambda device: HostTransfer(separate_memory=True)
    try:
        yield
    finally:
        plan.make_transfer = found


class Data:
    """Regression samples; each is a pure function of its number."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1).sin()


def make(kind: Kind, config: dict[str, Any] | None) -> tuple[rayzero.Engine, Any]:
    """An engine and its loader, of the session's state if it has one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 1)
    )
    with memory(kind):
        engine, _, loader, _ = rayzero.initialize(model=model, training_data=Data(), config=config)
    return engine, loader


def go_on(engine: rayzero.Engine, loader: Any, until: int) -> None:
    for x, y in loader.steps(until - engine.progress.step):
        engine.backward(nn.functional.mse_loss(engine(x).float(), y))
        engine.step()


@dataclass
class Whole:
    """A state as it is without sharding.

    Attributes:
        tensors: what is kept back of a parameter's gradient is one sum, `kept/<parameter>`.
        small: the JSON part, but for what is a rank's own or follows from the world.
    """

    tensors: dict[str, Tensor]
    small: dict[str, Any]


def whole(blocks: Sequence[Block]) -> Whole:
    tensors: dict[str, Tensor] = {}
    for block in blocks:
        factor = json.loads(block.small).get("residual_factor", 1.0)
        for one in block.table.ranges:
            logical = block.table.tensors[one.name]
            kept = one.name.startswith("residual.")
            name = f"kept/{one.name.partition('/')[2]}" if kept else one.name
            count, dtype = one.stop - one.start, DTYPE_BY_NAME[logical.dtype]
            values = torch.frombuffer(block.data, dtype=dtype, count=count, offset=one.offset)
            target = tensors.setdefault(name, torch.zeros(logical.numel, dtype=dtype))
            target[one.start : one.stop] += factor * values if kept else values
    documents = [json.loads(block.small) for block in blocks]
    document = documents[0]
    small = {key: document[key] for key in ("step", "sample_cursor", "skipped_steps", "loss_scale")}
    groups = zip(*(one["groups"] for one in documents), strict=True)
    # A rank without a parameter of a group has no scalars of it.
    small["scalars"] = [
        next((one["scalars"] for one in group if "scalars" in one), None) for group in groups
    ]
    return Whole(tensors, small)


def _moved(*keys: str) -> Callable[[Sequence[Block], Whole], bool]:
    """Whether the state has all of these, not all zero."""

    def check(_: Sequence[Block], state: Whole) -> bool:
        found = dict.fromkeys(keys, False)
        for name, one in state.tensors.items():
            key = name.partition("/")[0]
            if key in found:
                found[key] |= bool(one.abs().max() > 0)
        return all(found.values())

    return check


def _ranges(prefix: str) -> Callable[[Sequence[Block], Whole], bool]:
    """Whether every rank has ranges of that name, not all zero."""

    def check(blocks: Sequence[Block], _: Whole) -> bool:
        for block in blocks:
            mine = [one for one in block.table.ranges if one.name.startswith(prefix)]
            values = [
                torch.frombuffer(
                    block.data, dtype=torch.float32, count=one.stop - one.start, offset=one.offset
                )
                for one in mine
            ]
            if not any(bool(one.abs().max() > 0) for one in values):
                return False
        return True

    return check


def _scale(_: Sequence[Block], state: Whole) -> bool:
    scale = state.small["loss_scale"]
    return scale["value"] not in (2.0**8, 2.0**17) and scale["good_steps"] > 0


FOUND: dict[str, Callable[[Sequence[Block], Whole], bool]] = {
    "scale": _scale,
    "skipped": lambda _, state: state.small["skipped_steps"] > 0,
    "adam": _moved("optimizer.exp_avg", "optimizer.exp_avg_sq"),
    "momenta": _moved("optimizer.exp_avg", "optimizer.exp_avg_sq"),
    "lion": _moved("optimizer.exp_avg"),
    "momentum": _moved("optimizer.momentum_buffer"),
    "adagrad": _moved("optimizer.sum"),
    "terms": _ranges("residual.terms."),
    "sums": _ranges("residual.sum"),
    "basis": _moved("lowrank"),
}


def equal(seen: Whole, right: Whole, *, bits: bool) -> None:
    """Asserts that two states are equal. Residuals are sums of floats, in any order.

    Args:
        bits: residuals too, bit by bit.
    """
    assert seen.small == right.small
    assert seen.tensors.keys() == right.tensors.keys()
    for name, one in right.tensors.items():
        if bits or not name.startswith("kept/"):
            assert torch.equal(seen.tensors[name], one), name
        else:
            torch.testing.assert_close(seen.tensors[name], one, rtol=1e-5, atol=1e-7)
