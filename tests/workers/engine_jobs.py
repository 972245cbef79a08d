"""Training functions with two engines that train, and their plain-torch oracles.

args: `gates`, as of `survivor_jobs`; `stages`, of the engines; `kills`, the [rank, step, point] at
which a process kills itself: point n is the n-th phase of the job's step, of either engine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.data.sampling import SampleOrder
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired
from tests.workers.survivor_jobs import await_gate

SAMPLES, LENGTH, SEED = 12, 50, 3
WEIGHTS = ("first.pt", "second.pt")
SECOND = "second"


class Pairs:
    """Real points, and noise; each is a pure function of its index."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        drawn = torch.randn(10, generator=generator, dtype=torch.float64)
        return drawn[:6].sin(), drawn[6:]


def make_models() -> tuple[nn.Module, nn.Module]:
    """A critic of 6 values, and a generator of them from 4."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh())
    critic.append(nn.Linear(17, 1))
    generator = nn.Sequential(nn.Linear(4, 19), nn.Tanh(), nn.Linear(19, 6))
    return critic.double(), generator.double()


def make_reference() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6)).double()


def config(stage: int, lr: float) -> dict[str, Any]:
    return {
        "gradient_clipping": 0,
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200},
    }


def critic_loss(critic: Callable[..., Tensor], real: Tensor, fake: Tensor) -> Tensor:
    return (critic(fake).sin() - critic(real)).square().mean()


def gan(ctx: Any) -> None:
    """The critic's steps, `critic_steps` of them, then the generator's, over the critic's loader.
    Whose turn it is follows from the engine's steps."""
    watch(ctx)
    critic, generator = make_models()
    first, _, loader, _ = ctx.initialize(
        model=critic, training_data=Pairs(), config=config(ctx.args["stages"][0], 1e-2)
    )
    second, *_ = ctx.initialize(
        model=generator, config=config(ctx.args["stages"][1], 3e-3), name=SECOND
    )
    each = ctx.args.get("critic_steps", 1)
    total = Total(ctx, first)
    for real, noise in loader.until(ctx.steps * each):
        await_gate(ctx, 1 + first.global_steps // each)
        critic.zero_grad()  # what the generator's loss has brought
        fake = second(noise)
        first.backward(critic_loss(first, real, fake.detach()))
        first.step()
        total.follow()
        if first.was_step_applied() and first.global_steps % each:
            continue
        second.backward(first(fake).square().mean())
        second.step()
    total.follow()
    assert total.sum == sum(range(first.global_steps + 1)), total.sum
    save(ctx, first, second)


class Total:
    """The sum of the numbers of an engine's finished steps: state of the function's own, which goes
    back where a step is undone."""

    def __init__(self, ctx: Any, engine: Any) -> None:
        self.step = self.sum = 0
        self._engine = engine
        ctx.state("total", self._get, self._set)

    def follow(self) -> None:
        if self._engine.global_steps > self.step:
            self.step = self._engine.global_steps
            self.sum += self.step

    def _get(self) -> list[int]:
        self.follow()
        return [self.step, self.sum]

    def _set(self, value: list[int]) -> None:
        self.step, self.sum = value


def ppo(ctx: Any) -> None:
    """Two engines over batches that the function makes, each of which sees the other's model, and a
    reference that only evaluates, built first, if `reference` is its stage. The critic steps after
    `actor_steps` steps of the policy, which is counted by the policy's steps."""
    watch(ctx)
    critic, generator = make_models()
    reference: Callable[[Tensor], Tensor] = make_reference()
    if "reference" in ctx.args:
        plain = {"train_batch_size": SAMPLES}
        stage = {"zero_optimization": {"stage": ctx.args["reference"]}}
        reference, *_ = ctx.initialize(model=make_reference(), config=plain | stage)
    second_config = config(ctx.args["stages"][1], 3e-3)
    first, *_ = ctx.initialize(
        model=generator, config=config(ctx.args["stages"][0], 1e-2), name="actor"
    )
    second, *_ = ctx.initialize(model=critic, config=second_config, name=SECOND)
    each = ctx.args.get("actor_steps", 1)
    while second.global_steps < ctx.steps:
        await_gate(ctx, 1 + second.global_steps)
        real, noise = batch_of(first.global_steps)
        own = slice(*(SAMPLES * (ctx.rank + it) // ctx.world_size for it in (0, 1)))
        real, noise = real[own], noise[own]
        action, value = first(noise), second(real)
        with torch.no_grad():
            wanted = real + reference(noise)
        first.backward((action - wanted).square().mean() - (value.detach() * action).mean())
        first.step()
        if first.global_steps % each:
            continue
        second.backward((second(real) - action.detach().sum(1, keepdim=True)).square().mean())
        second.step()
    save(ctx, first, second)


def save(ctx: Any, *engines: Any) -> None:
    for name, engine in zip(WEIGHTS, engines, strict=True):
        weights = engine.state_dict()
        if ctx.is_main:
            torch.save(weights, ctx.output_dir / name)


def watch(ctx: Any) -> None:
    """Counts the phases of each of the job's steps, and kills this process in one of them."""
    session = ctx._session
    enter, at = session._enter_phase, [0, 0]

    def enter_and_die(phase: str) -> None:
        step = session._channel.progress.step
        at[:] = [step, at[1] + 1 if at[0] == step else 1]
        name = kill_name(ctx.rank, *at)
        if [ctx.rank, *at] in ctx.args.get("kills", ()):
            record = FaultRecord(ctx.output_dir)
            if name not in {fired.fault for fired in record.read()}:
                record.add(FaultFired(ctx.rank, step, name))
                os.kill(os.getpid(), signal.SIGKILL)
        enter(phase)

    session._enter_phase = enter_and_die


def kill_name(rank: int, step: int, point: int) -> str:
    return f"kill of rank {rank} in step {step} at point {point}"


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """All ranks' samples of a step of the first engine."""
    data, order = Pairs(), SampleOrder(LENGTH, SEED)
    drawn = [data[int(it)] for it in order.indices(step * SAMPLES, SAMPLES)]
    return torch.stack([real for real, _ in drawn]), torch.stack([noise for _, noise in drawn])


Oracle = Iterator[tuple[list[float], tuple[dict[str, Tensor], dict[str, Tensor]]]]
"""After each step of the job the engines' losses, and their weights."""


def plain_gan(critic_steps: int = 1) -> Oracle:
    critic, generator = make_models()
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=lr)
        for model, lr in ((critic, 1e-2), (generator, 3e-3))
    ]
    step = 0
    while True:
        for _ in range(critic_steps):
            real, noise = batch_of(step)
            step += 1
            fake = generator(noise)
            losses = [critic_loss(critic, real, fake.detach())]
            update(optimizers[0], losses[0])
        losses.append(critic(fake).square().mean())
        update(optimizers[1], losses[1])
        yield [loss.item() for loss in losses], (weights_of(critic), weights_of(generator))


def plain_ppo(actor_steps: int = 1) -> Oracle:
    critic, generator = make_models()
    reference = make_reference()
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=lr)
        for model, lr in ((generator, 1e-2), (critic, 3e-3))
    ]
    step = 0
    while True:
        for _ in range(actor_steps):
            real, noise = batch_of(step)
            step += 1
            action, value = generator(noise), critic(real)
            wanted = real + reference(noise).detach()
            losses = [(action - wanted).square().mean() - (value.detach() * action).mean()]
            update(optimizers[0], losses[0])
        losses.append((critic(real) - action.detach().sum(1, keepdim=True)).square().mean())
        update(optimizers[1], losses[1])
        yield [loss.item() for loss in losses], (weights_of(generator), weights_of(critic))


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
