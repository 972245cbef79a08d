"""Step 3: proximal policy optimization with an actor, a critic, a reference and a reward model.

    rayzero run examples/rlhf/ppo.yaml

The ranks train two engines, the actor and the critic; the reference is a third one, which only
evaluates, so that it can be sharded as the others are. The reward model has workers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from examples.rlhf.grpo import generate
from examples.rlhf.losses import (
    advantages_and_returns,
    end_scores,
    penalized_rewards,
    policy_loss,
    value_loss,
)
from examples.rlhf.model import Scorer, load_policy, load_scorer, save_trained
from examples.rlhf.rollout import Batch, Sample, answer_log_probs, collate, evaluate, metrics
from examples.rlhf.task import END, PAD, PROMPT_LENGTH, Questions, question

if TYPE_CHECKING:
    from rayzero import Context, Engine, RoleContext

__all__ = ["generate", "score", "train"]


def train(ctx: Context) -> dict[str, Any]:
    """Trains for `ctx.steps` steps, and writes the actor.

    `ctx.args`: `output_dir`; `actor_model_name_or_path` and `critic_model_name_or_path`, the
    folders of the policy and of the reward model, from which the critic begins; `critic` and
    `reference`, the engine configs of these two.
    """
    actor_folder = ctx.args["actor_model_name_or_path"]
    reference, *_ = ctx.initialize(
        model=load_policy(actor_folder), config=ctx.args["reference"], name="reference"
    )
    actor, *_ = ctx.initialize(model=load_policy(actor_folder), name="policy")
    critic, *_ = ctx.initialize(
        model=load_scorer(ctx.args["critic_model_name_or_path"]),
        config=ctx.args["critic"],
        name="critic",
    )
    loader = ctx.rollouts(Questions(question), actor, collate_fn=collate)
    for batch in loader.until(ctx.steps):
        ctx.report(**metrics(batch))
        update(actor, critic, reference, batch)
    return evaluate(save_trained(actor, ctx.args["output_dir"]))


def update(actor: Engine, critic: Engine, reference: Engine, batch: Batch) -> None:
    """One step of both engines, on samples that are trained on once."""
    with torch.no_grad():
        expected = answer_log_probs(reference(batch.tokens), batch.tokens)
    values = critic(batch.tokens)[:, PROMPT_LENGTH - 1 : -1]  # before each token of the answer
    # The score belongs to the token behind this mask: the end of the answer.
    inside = batch.mask * (batch.answers != END)
    rewards = penalized_rewards(batch.log_probs, expected, batch.scores, inside)
    advantages, returns = advantages_and_returns(values, rewards, inside)

    log_probs = answer_log_probs(actor(batch.tokens), batch.tokens)
    actor.backward(policy_loss(log_probs, batch.log_probs, advantages, batch.mask))
    actor.step()
    critic.backward(value_loss(values, values.detach(), returns, batch.mask))
    critic.step()


def score(ctx: RoleContext) -> None:
    """Rates the answers by the reward model, until the job ends. `ctx.args`:
    `critic_model_name_or_path`, its folder."""
    scorer = load_scorer(ctx.args["critic_model_name_or_path"]).to(ctx.device)
    for task in ctx.tasks():
        samples = rate_group(scorer, task.samples)
        task.done(samples)
        for sample in samples:
            ctx.report(reward=sample.score)


@torch.no_grad()
def rate_group(scorer: Scorer, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the reward model's scores of them."""
    tokens = torch.stack([it.tokens for it in samples]).to(scorer.head.weight.device)
    scores = end_scores(scorer(tokens), tokens, PAD).tolist()
    return [it.scored(of) for it, of in zip(samples, scores, strict=True)]
