"""An engine that is re-cut for other ranks in the middle of a step. The oracle is plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import rayzero
from rayzero.engine.offload import plan
from rayzero.engine.offload.transfer import HostTransfer
from rayzero.engine.session import use_session
from tests.engine.generations import Generations, end_together, shared_store
from tests.engine.state.blocks import BlocksSource, StateSession
from tests.support.ranks import run_ranks
from tests.workers.recovery_jobs import Data, engine_config, make_model, oracle

SEED = 3
STEPS_EACH = 2  # finished steps of each generation


def live_through(
    rank: int,
    world: int,
    config: dict[str, Any],
    sizes: Sequence[int],
    how: Literal["own", "source", "rebuild"],
    make: Callable[[], nn.Module],
    steps: int,
) -> tuple[dict[str, Tensor], list[tuple[int, int, int]]]:
    """Trains through all generations; the weights at the end, and the bytes of each re-cut."""
    store = shared_store(rank)
    generations, weights, moved = Generations(rank, sizes, how, store), {}, []
    separate = config["zero_optimization"].get("offload_optimizer")
    apart = mock.patch.object(
        plan, "make_transfer", side_effect=lambda device: HostTransfer(separate_memory=True)
    )
    with apart if separate else nullcontext():
        while not generations.is_last:
            if generations.form():
                weights, bytes_of = train_as_member(generations, config, make, steps)
                moved += bytes_of
    end_together(store, rank, world)
    return weights, moved


def train_as_member(
    generations: Generations, config: dict[str, Any], make: Callable[[], nn.Module], steps: int
) -> tuple[dict[str, Tensor], list[tuple[int, int, int]]]:
    """One training loop, from this rank's entry until it leaves, or the end."""
    model = make()
    with use_session(StateSession(generations.blocks() or None, seed=SEED)):
        engine, optimizer, loader, _ = rayzero.initialize(
            model=model, training_data=Data(), config=config
        )
    told: list[tuple[int, int]] = []
    engine.on_reconfigure(lambda it: told.append((it.rank, it.world_size)))
    carried, expected = _register_state(generations, engine)
    assert carried == expected
    params, torch_optimizer = [*model.parameters()], optimizer.optimizer
    begin, published, moved = engine.global_steps, -1, []
    compiled, graphs, hooks = "compile" in config, 0, 0
    for x, y in loader.until(steps):
        if engine.global_steps == begin + STEPS_EACH and not generations.is_last:
            if published != generations.number:
                generations.publish(engine)
                published = generations.number
            engine.backward(loss(engine, x, y))  # of a step that never ends
            if generations.how == "rebuild" or not generations.form():
                engine.close()
                return {}, moved
            keep = generations.how == "own"
            reads = engine.survival.recut(BlocksSource(generations.blocks()), keep=keep)
            moved.append((reads.bytes_moved, reads.bytes_copied, reads.bytes_read))
            assert told[len(moved) - 1 :] == [(engine.rank, engine.world_size)]
            begin = engine.global_steps
            continue
        engine.backward(loss(engine, x, y))
        engine.step()
        hooks = hooks or _count_hooks(model)
        if compiled:
            # A survivor compiles nothing after its first step, also where micro-batches differ.
            graphs = graphs or counters["stats"]["unique_graphs"]
            assert counters["stats"]["unique_graphs"] == graphs > 0
    assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
    assert engine.optimizer is optimizer
    assert torch_optimizer.param_groups is optimizer.param_groups
    assert engine.module is model
    assert _count_hooks(model) == hooks
    assert carried == expected, "a survivor keeps its own"
    assert engine.global_steps == steps
    weights = engine.module_state_dict()
    engine.close()
    return weights, moved


def _register_state(generations: Generations, engine: Any) -> tuple[list[Any], list[Any]]:
    """State of this rank and step: what `set` gets, and what it should have got by now: this rank's
    value of the previous generation, or rank 0's, if that had fewer ranks; nothing at the start."""
    carried: list[Any] = []
    engine.state.register("own", lambda: [engine.rank, engine.global_steps], carried.append)
    number = generations.number
    before = generations.sizes[number - 1] if number else 0
    source = generations.rank if generations.rank < before else 0
    return carried, [[source, number * STEPS_EACH]] if number else []


def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(engine(x).double(), y.double())


def _count_hooks(model: nn.Module) -> int:
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    ) + sum(len(it._post_accumulate_grad_hooks or ()) for it in model.parameters())


SIZES = (3, 2, 3, 1, 3)
STEPS = STEPS_EACH * len(SIZES)


def make_plain() -> nn.Module:
    return make_model(torch.float64)


class Block(nn.Module):
    """Dropout, whose random numbers a re-cut restores; a frozen layer; a buffer that forward
    changes, and one that no state contains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.frozen = nn.Linear(2 * width + 1, width).requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        shift = self.scale.to(x.dtype) * self.mean.to(x.dtype)
        return x + self.frozen(torch.tanh(self.up(self.drop(x)))) + shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(6, 10)
        self.blocks = nn.ModuleList([Block(10) for _ in range(3)])
        self.outward = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x.to(self.inward.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


def make_irregular() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("how", ["own", "source"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_those_of_plain_torch_through_changes_of_ranks(stage: int, how: str):
    sizes = (1, *SIZES[1:]) if how == "own" else SIZES  # also where an engine begins on one rank
    results = run_ranks(3, live_through, engine_config(stage), sizes, how, make_plain, STEPS)
    for name, expected in oracle(STEPS).items():
        torch.testing.assert_close(results[0][0][name], expected, rtol=1e-9, atol=1e-12)
    assert len(results[0][1]) == len(SIZES) - 1
    for moved, copied, _ in results[0][1]:
        assert bool(moved + copied) == (how == "own")


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 200} | keys}


def compressed(**keys: Any) -> dict[str, Any]:
    return {"rayzero": {"compression": keys}}


def optimizer(name: str) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-2}}}


ROWS = {
    "bf16, momentum": zero(2) | BF16 | optimizer("SGD"),
    "fp16, accumulation, low rank": zero(1)
    | FP16
    | {"train_micro_batch_size_per_gpu": 2}
    | compressed(gradients="lowrank"),
    "schedule, clipping, quantized weights, secondary shards": zero(
        3, zero_quantized_weights=True, zero_hpz_partition_size=3
    )
    | SCHEDULE
    | {"gradient_clipping": 0.1},
    "Adagrad, every block gathered": zero(3)
    | optimizer("Adagrad")
    | {"rayzero": {"reshard_after_forward": False}},
    "Muon, one reduction a step": zero(2)
    | optimizer("Muon")
    | {"rayzero": {"reduce_each_micro_step": False}},
    "LAMB, large modules": zero(3) | optimizer("Lamb") | {"rayzero": {"unshard_min_numel": 1}},
    "1-bit Adam": zero(0) | optimizer("OneBitAdam"),
    "host memory": zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
    "host memory in part, unused": zero(1, offload_optimizer={"device": "cpu", "ratio": 0.5})
    | BF16
    | {"rayzero": {"unused_gradients": "none"}},
    "files": zero(3, offload_optimizer={"device": "nvme"}) | BF16,
    "quantized gradients": zero(2) | compressed(gradients="int8", error_feedback=True),
    "signs": zero(0) | compressed(gradients="sign"),
}


@pytest.mark.parametrize("row", ROWS)
def test_re_cut_engine_is_bit_by_bit_one_that_was_built_anew(row: str, tmp_path: Path):
    """Building anew is compared with plain torch elsewhere."""
    config = engine_config(0) | copy.deepcopy(ROWS[row])
    if "nvme" in str(config):
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path)
    check_like_built_anew(config, SIZES)


def check_like_built_anew(config: dict[str, Any], sizes: Sequence[int]) -> None:
    steps = STEPS_EACH * len(sizes)
    ends = [
        run_ranks(3, live_through, config, sizes, how, make_irregular, steps)[0][0]
        for how in ("own", "rebuild")
    ]
    for name, expected in ends[1].items():
        assert torch.equal(ends[0][name], expected), name


@pytest.mark.parametrize("stage", [1, 3])
def test_survivors_compile_nothing_again(stage: int):
    check_like_built_anew(
        engine_config(stage) | {"compile": {"enabled": True, "backend": "eager"}}, (3, 2, 3)
    )
