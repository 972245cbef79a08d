"""A script's own `loss.backward()`, and several backwards before a step: equal to plain torch."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayzero.engine.api.tensor_fragments import safe_get_full_grad
from rayzero.engine.errors import EngineError
from tests.engine.equal import (
    Plain,
    Script,
    assert_equal,
    check_equal,
    make,
    normal_batches,
    sgd,
    start,
)
from tests.support.ranks import run_ranks

STEPS = 3


class Net(nn.Module):
    """Blocks of stage 3, recomputed or not."""

    def __init__(self, reentrant: bool | None = None, outputs: int = 1) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, outputs)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant:
            x = x + 0 * self.head.bias
        for block in self.inner:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


OPTIONS: dict[str, Any] = {
    "gradient_clipping": 0.05,
    "zero": {"reduce_bucket_size": 30},
    "rayzero": {"unshard_modules": ["Sequential"]},
}


def make_engine(stage: int, model: nn.Module, **more: Any) -> Any:
    return start(model, stage, **OPTIONS | {"samples": 4 * ranks()} | more)


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def batches(count: int) -> list[Tensor]:
    return normal_batches(count, 4)


def own(engine: Any, x: Tensor) -> None:
    engine(x).square().mean().backward()
    engine.step()
    assert isinstance(engine, Plain) or engine.metrics.loss is None


def own_scaled(engine: Any, x: Tensor) -> None:
    engine.scale(engine(x).square().mean()).backward()
    engine.step()


def regularized(engine: Any, x: Tensor) -> None:
    """A term that reaches parameters beside the model's outputs."""
    (engine.module(x).square().mean() + engine.module.head.bias.square().sum()).backward()
    engine.step()


def twice(engine: Any, x: Tensor) -> None:
    engine.backward(engine(x).square().mean())
    engine.backward(engine(x).sum() * 0.1)
    engine.step()


def twice_own(engine: Any, x: Tensor) -> None:
    out = engine(x)
    out.square().mean().backward(retain_graph=True)
    (out.sum() * 0.1).backward()
    engine.step()


def mixed(engine: Any, x: Tensor) -> None:
    engine.backward(engine(x).square().mean())
    engine.backward(engine(x).sum() * 0.1)
    (engine(x).abs().mean()).backward()
    engine.step()


def with_grad_of_input(engine: Any, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    out = engine(x)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    out.square().mean().backward()
    engine.step()


def penalty(engine: Any, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
    (slope.square().mean() + engine(x).mean()).backward()
    engine.step()


CASES: list[tuple[Script, bool | None, int]] = [
    (own, None, 1),
    (own_scaled, None, 2),
    (own, True, 2),
    (own, False, 1),
    (twice, None, 1),
    (twice, False, 2),
    (twice_own, None, 2),
    (mixed, True, 1),
    (with_grad_of_input, None, 1),
    (regularized, None, 2),
    (penalty, None, 1),
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equal_to_plain_torch(stage: int) -> None:
    cases = [it for it in CASES if stage < 3 or it[0] not in (penalty, regularized)]
    check_equal(
        [
            (
                partial(Net, reentrant),
                script,
                OPTIONS | {"stage": stage, "gradient_accumulation_steps": micro_steps},
            )
            for script, reentrant, micro_steps in cases
        ],
        batches(STEPS),
    )


def adversaries(rank: int, world: int, stage: int) -> None:
    """The generator's loss brings the discriminator gradients, which its `zero_grad` forgets."""
    for who in ("engine", "module", "optimizer"):
        nets = [make(partial(Net, None, outputs), 5) for outputs in (4, 1)]
        plain = copy.deepcopy(nets)
        made, judge = (make_engine(stage, net, samples=8) for net in nets)
        optimizers = [sgd([{"params": it.parameters()}]) for it in plain]
        for batch in batches(STEPS):
            part = batch.chunk(world)[rank]
            zeroed = {"engine": judge, "module": nets[1], "optimizer": judge.optimizer}[who]
            zeroed.zero_grad()
            (1 - judge(part)).square().mean().backward()
            judge.backward(judge(made(part).detach()).square().mean())
            judge.step()
            loss = (1 - judge(made(part))).square().mean()
            made.backward(loss) if stage < 2 else loss.backward()
            made.step()
            plain[1].zero_grad()
            (1 - plain[1](batch)).square().mean().backward()
            plain[1](plain[0](batch).detach()).square().mean().backward()
            nn.utils.clip_grad_norm_(plain[1].parameters(), 0.05)
            optimizers[1].step()
            plain[0].zero_grad()
            (1 - plain[1](plain[0](batch))).square().mean().backward()
            nn.utils.clip_grad_norm_(plain[0].parameters(), 0.05)
            optimizers[0].step()
        for engine, expected in zip((made, judge), plain, strict=True):
            state = engine.state_dict()
            if rank == 0:
                assert_equal(state, expected.state_dict(), who)


def train_by_one_loss(rank: int, world: int, stage: int) -> None:
    """One engine's backward brings both their gradients, which no other loss forgets."""
    nets = [make(partial(Net, None, outputs), 5) for outputs in (4, 1)]
    plain = copy.deepcopy(nets)
    made, judge = (make_engine(stage, net, samples=8) for net in nets)
    optimizers = [sgd([{"params": it.parameters()}]) for it in plain]
    for batch in batches(STEPS):
        part = batch.chunk(world)[rank]
        made.backward((1 - judge(made(part))).square().mean())
        made.step()
        judge.step()
        for net in plain:
            net.zero_grad()
        (1 - plain[1](plain[0](batch))).square().mean().backward()
        for net, optimizer in zip(plain, optimizers, strict=True):
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
    for engine, expected in zip((made, judge), plain, strict=True):
        state = engine.state_dict()
        if rank == 0:
            assert_equal(state, expected.state_dict(), "together")


@pytest.mark.parametrize("stage", [0, 3])
def test_one_engines_loss_trains_both(stage: int) -> None:
    run_ranks(2, train_by_one_loss, stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_engines_in_one_loss(stage: int) -> None:
    run_ranks(2, adversaries, stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("who", ["engine", "module", "optimizer"])
def test_zero_grad_forgets_what_no_step_followed(who: str, stage: int) -> None:
    """As in plain torch: inside `no_sync`, after it, and where more micro-steps were declared."""
    forgotten, x = batches(2)
    for inside in (True, False, None):
        engine = make_engine(stage, make(Net))
        zeroed = {"engine": engine, "module": engine.module, "optimizer": engine.optimizer}[who]
        if inside is None:
            engine.set_gradient_accumulation_boundary(False)
        with nullcontext() if inside is None or stage > 1 else engine.no_sync():
            engine.backward(engine(forgotten).square().mean())
            assert engine.inside_no_sync_ctxt is (inside is not None and stage < 2)
            if inside:
                zeroed.zero_grad()
        if not inside:
            zeroed.zero_grad()
        if inside is None:
            engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(x).square().mean())
        engine.step()
        loss = (plain := make(Net))(x).square().mean()
        norm = torch.nn.utils.get_total_norm(torch.autograd.grad(loss, list(plain.parameters())))
        assert engine.metrics.grad_norm == pytest.approx(norm.item(), rel=1e-12)
        assert engine.metrics.loss == pytest.approx(loss.item(), rel=1e-12)
        engine.close()


def test_copies_of_a_model_with_an_engine_have_torch_s_zero_grad() -> None:
    engine = make_engine(1, model := make(Net))
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    engine.backward(engine(batches(1)[0]).square().mean())
    for it in copies:
        it(batches(1)[0]).square().mean().backward()
        it.zero_grad()
        assert all(param.grad is None for param in it.parameters())
    assert not engine._step.tracker.zeroed
    model.zero_grad()
    assert engine._step.tracker.zeroed


def odd_uses(rank: int, world: int, stage: int) -> None:
    """Failures, gradients of a part of a step, a micro-step that brings no gradient."""
    x = batches(1)[0].chunk(world)[rank]
    engine = make_engine(stage, make(Net), managed_gradient_accumulation=False)
    plain = make(Net)
    with pytest.raises(EngineError, match="every step"):
        engine.set_gradient_accumulation_boundary(True)
    out = engine(x)
    out.register_hook(FailOnce())
    engine.module.inner[0][0].weight.register_hook(fail := FailOnce())
    for _ in range(2):  # at the output, then in the midst
        with pytest.raises(ArithmeticError):
            out.square().mean().backward(retain_graph=True)
    assert fail.calls == 1
    for _ in range(3):  # unmanaged: the gradients of three, then a step
        engine(x).square().mean().backward()
    if stage < 2:
        (3 * plain(x).square().mean()).backward()
        mine = safe_get_full_grad(engine.module.head.weight)
        torch.testing.assert_close(mine, plain.head.weight.grad)
    plain.zero_grad()
    (3 * plain(batches(1)[0]).square().mean()).backward()
    engine.step()
    norm = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()])
    assert engine.metrics.grad_norm == pytest.approx(norm.item(), rel=1e-12)
    assert not engine.is_gradient_accumulation_boundary()
    with pytest.raises(EngineError, match="create_graph"):
        engine(x).mean().backward(create_graph=True)
    for transform in (torch.func.vmap(engine), torch.func.grad(lambda x: engine(x).sum())):
        if stage == 3:
            with pytest.raises(EngineError, match=r"torch\.func"):
                transform(x)
        else:
            assert len(transform(x)) == len(x)
    engine.backward(engine(x).mean())
    engine.step()
    engine.close()


class FailOnce:
    """A hook that raises at its first call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, grad: Tensor) -> None:
        self.calls += 1
        if self.calls == 1:
            raise ArithmeticError


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_failures_and_unmanaged_accumulation(stage: int) -> None:
    run_ranks(2, odd_uses, stage)


def test_fp16_needs_scale() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8}
    engine = make_engine(2, make(Net).float(), fp16=fp16)
    x = batches(1)[0].half()
    with pytest.raises(EngineError, match="was not scaled"):
        engine(x).float().square().mean().backward()
    loss = engine(x).float().square().mean()
    scaled = engine.scale(loss)
    assert scaled == loss * 256
    scaled.backward()
    own_grad = safe_get_full_grad(engine.module.head.weight)
    engine.step()
    other = make_engine(2, make(Net).float(), fp16=fp16)
    other.backward(other(x).float().square().mean())
    torch.testing.assert_close(own_grad, safe_get_full_grad(other.module.head.weight))
    other.step()
    assert engine.metrics.loss == pytest.approx(other.metrics.loss)
    torch.testing.assert_close(engine.state_dict(), other.state_dict())


def test_backward_returns_the_loss_of_a_step() -> None:
    engine = make_engine(1, Net(), samples=16, gradient_accumulation_steps=2)
    loss = engine(batches(1)[0].float()).mean()
    assert engine.backward(loss, scale_wrt_gas=False) is loss
    engine.step()
    loss = engine(batches(1)[0].float()).mean()
    assert engine.backward(loss) == loss / 2


def test_the_engine_is_a_module() -> None:
    model = Net()
    engine = make_engine(3, model)
    assert isinstance(engine, nn.Module)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in engine.named_parameters()] == names
    assert list(engine.modules()) == list(model.modules())
    assert engine.eval().training is model.training is False
    around = nn.Sequential(engine)
    assert [name for name, _ in around.named_parameters()] == [f"0.{name}" for name in names]
    assert list(around.state_dict()) == [f"0.{name}" for name in names]
    around.train()
    assert model.training
    engine.anything = nn.Linear(1, 1)
    assert len(list(engine.parameters())) == len(names)
    assert not hasattr(engine, "half")
    assert around(batches(1)[0].float()).shape == (8, 1)
