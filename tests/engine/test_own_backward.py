"""A script's own `loss.backward()`, and several backwards before a step: equal to plain torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rayzero
from rayzero.engine.api.tensor_fragments import safe_get_full_grad
from rayzero.engine.errors import EngineError
from tests.support.ranks import run_ranks

STEPS = 3
Script = Callable[[Any, Tensor], None]


class Net(nn.Module):
    """Blocks of stage 3, recomputed or not."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 1)
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


def make_engine(stage: int, model: nn.Module, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 30},
        "rayzero": {"unshard_modules": ["Sequential"]},
        **more,
    }
    return rayzero.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(count)]


def own(engine: Any, x: Tensor) -> None:
    engine(x).square().mean().backward()


def own_scaled(engine: Any, x: Tensor) -> None:
    engine.scale(engine(x).square().mean()).backward()


def regularized(engine: Any, x: Tensor) -> None:
    """A term that reaches parameters beside the model's outputs."""
    (engine.module(x).square().mean() + engine.module.head.bias.square().sum()).backward()


def twice(engine: Any, x: Tensor) -> None:
    engine.backward(engine(x).square().mean())
    engine.backward(engine(x).sum() * 0.1)


def twice_own(engine: Any, x: Tensor) -> None:
    out = engine(x)
    out.square().mean().backward(retain_graph=True)
    (out.sum() * 0.1).backward()


def mixed(engine: Any, x: Tensor) -> None:
    engine.backward(engine(x).square().mean())
    engine.backward(engine(x).sum() * 0.1)
    (engine(x).abs().mean()).backward()


def with_grad_of_input(engine: Any, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    out = engine(x)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    out.square().mean().backward()


def penalty(engine: Any, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
    (slope.square().mean() + engine(x).mean()).backward()


class Plain:
    """Plain torch over all ranks' samples, called as an engine."""

    def __init__(self, model: nn.Module) -> None:
        self.module = self.model = model
        self.parts = 1

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def train_plain(script: Script, world: int, micro_steps: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for batch in batches(STEPS):
        optimizer.zero_grad()
        parts = [p for share in batch.chunk(world) for p in share.chunk(micro_steps)]
        for part in parts:
            script(Plain(model), part)
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= len(parts)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return dict(model.state_dict())


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


def train_cases(rank: int, world: int, stage: int) -> list[dict[str, Tensor]]:
    results = []
    for script, reentrant, micro_steps in CASES:
        if stage == 3 and script in (penalty, regularized):
            continue
        torch.manual_seed(0)
        engine = make_engine(
            stage,
            Net(reentrant).double(),
            train_micro_batch_size_per_gpu=8 // world // micro_steps,
            gradient_accumulation_steps=micro_steps,
        )
        for batch in batches(STEPS):
            for part in batch.chunk(world)[rank].chunk(micro_steps):
                script(engine, part)
                engine.step()
        if script is own:
            assert engine.metrics.loss is None
        else:
            assert script not in (own_scaled, twice) or engine.metrics.loss > 0
        results.append({k: v.clone() for k, v in engine.state_dict().items()})
        engine.close()
    return results


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equal_to_plain_torch(stage: int) -> None:
    results = iter(run_ranks(2, train_cases, stage)[0])
    for script, _, micro_steps in CASES:
        if stage == 3 and script in (penalty, regularized):
            continue
        expected = train_plain(script, 2, micro_steps)
        torch.testing.assert_close(next(results), expected, rtol=1e-12, atol=1e-12, msg=str(script))


def adversaries(rank: int, world: int, stage: int) -> list[dict[str, Tensor]]:
    return [train_adversaries(rank, world, stage, who) for who in ("engine", "module", "optimizer")]


def train_adversaries(rank: int, world: int, stage: int, who: str) -> dict[str, Tensor]:
    """The generator's loss brings the discriminator gradients, which its `zero_grad` forgets."""
    torch.manual_seed(0)
    nets = [Net().double(), Net().double()]
    for net in nets:
        net.head = nn.Linear(4, 4 if net is nets[0] else 1).double()
    made, judge = (
        make_engine(stage, net, train_micro_batch_size_per_gpu=8 // world) for net in nets
    )
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
    return {**made.state_dict(), **{f"j.{k}": v for k, v in judge.state_dict().items()}}


def plain_adversaries() -> dict[str, Tensor]:
    torch.manual_seed(0)
    made, judge = Net().double(), Net().double()
    for net in (made, judge):
        net.head = nn.Linear(4, 4 if net is made else 1).double()
    optimizers = [torch.optim.SGD(it.parameters(), lr=0.5, momentum=0.9) for it in (made, judge)]
    for batch in batches(STEPS):
        judge.zero_grad()
        (1 - judge(batch)).square().mean().backward()
        judge(made(batch).detach()).square().mean().backward()
        nn.utils.clip_grad_norm_(judge.parameters(), 0.05)
        optimizers[1].step()
        made.zero_grad()
        (1 - judge(made(batch))).square().mean().backward()
        nn.utils.clip_grad_norm_(made.parameters(), 0.05)
        optimizers[0].step()
    return {**made.state_dict(), **{f"j.{k}": v for k, v in judge.state_dict().items()}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_engines_in_one_loss(stage: int) -> None:
    for result in run_ranks(2, adversaries, stage)[0]:
        torch.testing.assert_close(result, plain_adversaries(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("who", ["engine", "module", "optimizer"])
def test_zero_grad_forgets_what_no_step_followed(who: str, stage: int) -> None:
    """As in plain torch: inside `no_sync`, after it, and where more micro-steps were declared."""
    forgotten, x = batches(2)
    for inside in (True, False, None):
        torch.manual_seed(0)
        engine = make_engine(stage, Net().double())
        zeroed = {"engine": engine, "module": engine.module, "optimizer": engine.optimizer}[who]
        if inside is None:
            engine.set_gradient_accumulation_boundary(False)
        with nullcontext() if inside is None or stage > 1 else engine.no_sync():
            engine.backward(engine(forgotten).square().mean())
            if inside:
                zeroed.zero_grad()
        if not inside:
            zeroed.zero_grad()
        if inside is None:
            engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(x).square().mean())
        engine.step()
        torch.manual_seed(0)
        loss = (plain := Net().double())(x).square().mean()
        norm = torch.nn.utils.get_total_norm(torch.autograd.grad(loss, list(plain.parameters())))
        assert engine.metrics.grad_norm == pytest.approx(norm.item(), rel=1e-12)
        assert engine.metrics.loss == pytest.approx(loss.item(), rel=1e-12)
        engine.close()


def test_zero_grad_between_steps_of_an_accumulation_forgets_nothing() -> None:
    torch.manual_seed(0)
    engine = make_engine(1, model := Net().double(), gradient_accumulation_steps=2)
    losses = [model(x).square().mean().item() for x in batches(2)]
    for x in batches(2):
        engine.backward(engine(x).square().mean())
        engine.step()
        engine.zero_grad()
    assert engine.metrics.loss == pytest.approx(sum(losses) / 2, rel=1e-12)


def test_copies_of_a_model_with_an_engine_have_torch_s_zero_grad() -> None:
    torch.manual_seed(0)
    engine = make_engine(1, model := Net().double())
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
    torch.manual_seed(0)
    engine = make_engine(stage, Net().double(), managed_gradient_accumulation=False)
    torch.manual_seed(0)
    plain = Net().double()
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
        out = engine(x)
        out.square().mean().backward()
        if stage < 2:
            plain.zero_grad()
    if stage < 2:
        (3 * plain(x).square().mean()).backward()
        mine = safe_get_full_grad(engine.module.head.weight)
        torch.testing.assert_close(mine, plain.head.weight.grad)
    plain.zero_grad()
    for part in batches(1)[0].chunk(world):
        (3 * plain(part).square().mean() / world).backward()
    grads = {name: param.grad for name, param in plain.named_parameters()}
    engine.step()
    norm = torch.linalg.vector_norm(torch.stack([it.norm() for it in grads.values()]))
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
    torch.manual_seed(0)
    fp16 = {"enabled": True, "initial_scale_power": 8}
    engine = make_engine(2, Net(), fp16=fp16)
    x = batches(1)[0].half()
    with pytest.raises(EngineError, match="was not scaled"):
        engine(x).float().square().mean().backward()
    loss = engine(x).float().square().mean()
    scaled = engine.scale(loss)
    assert scaled == loss * 256
    scaled.backward()
    own_grad = safe_get_full_grad(engine.module.head.weight)
    engine.step()
    torch.manual_seed(0)
    other = make_engine(2, Net(), fp16=fp16)
    other.backward(other(x).float().square().mean())
    torch.testing.assert_close(own_grad, safe_get_full_grad(other.module.head.weight))
    other.step()
    assert engine.metrics.loss == pytest.approx(other.metrics.loss)
    torch.testing.assert_close(engine.state_dict(), other.state_dict())


def test_backward_returns_the_loss_of_a_step() -> None:
    engine = make_engine(1, Net(), gradient_accumulation_steps=2)
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
