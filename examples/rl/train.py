"""Trains a policy for CartPole by proximal policy optimization (Schulman et al. 2017).

    rayzero run examples/rl/job.yaml

`train` runs on every worker. It plays with all ranks between two steps, so it does not stay in its
loop after a fault or a change of the number of workers, but is called again, in new processes.
Policy, optimizer, step and random states are then restored; environments are not: each worker makes
new ones and plays with the restored policy. What was played before is dropped, which is right for
an on-policy method, and costs at most one rollout.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.rl.model import ActorCritic
from examples.rl.rollout import Environments, Rollout, evaluate

if TYPE_CHECKING:
    from rayzero import Context, Engine

ROLLOUT_STEPS = 32
UPDATES = 16  # optimizer steps with each rollout
DISCOUNT, DECAY = 0.98, 0.9
CLIP, VALUE_WEIGHT = 0.2, 0.5
EPISODES = 100  # of the evaluation


def train(ctx: Context) -> dict[str, Any]:
    """Train for `ctx.steps` optimizer steps. Returns entries for the job's summary."""
    torch.manual_seed(ctx.seed)
    engine, *_ = ctx.initialize(model=ActorCritic(observation=4, actions=2, **ctx.args))
    # train_batch_size counts environments: each worker has its part of them. Their seed differs by
    # rank and by step, so that a worker that starts again does not replay the same episodes.
    count, first_step = engine.settings.batches.micro_batch, engine.progress.step
    seed = hash((ctx.seed, first_step, ctx.rank)) % 2**31
    environments = Environments(count, seed, engine.device)
    while engine.progress.step < ctx.steps:
        rollout = environments.play(engine, ROLLOUT_STEPS, DISCOUNT, DECAY)
        if environments.finished:
            ctx.report(episode_return=fmean(environments.finished))  # on the page
        for _ in range(min(UPDATES, ctx.steps - engine.progress.step)):
            engine.backward(policy_loss(engine, rollout))
            engine.step()
    return {"mean_return": mean_return(engine, seed)}


def policy_loss(engine: Engine, rollout: Rollout) -> Tensor:
    """The clipped objective, and the squared error of the values."""
    valid, advantages = rollout.valid, rollout.advantages
    advantages = (advantages - advantages[valid].mean()) / (advantages[valid].std() + 1e-8)
    choices, values = engine(rollout.observations)
    log_probs = choices.gather(2, rollout.actions.unsqueeze(2)).squeeze(2)
    ratio = (log_probs - rollout.log_probs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    loss = VALUE_WEIGHT * (values - rollout.returns).square() - gain
    return loss[valid].mean()


def mean_return(engine: Engine, seed: int) -> float:
    """Mean return of at least EPISODES new episodes, the same number on each rank. Collective."""
    episodes = -(-EPISODES // engine.world_size)
    returns = evaluate(engine, episodes, seed + 1, engine.device)
    total = torch.tensor(fmean(returns), device=engine.device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / engine.world_size
