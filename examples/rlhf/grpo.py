"""Step 3: group-relative policy optimization, with generators and a judge in other processes.

    rayzero run examples/rlhf/job.yaml

`train` runs on the ranks, `generate` in the workers of the role `rollout`, `score` in those of
`reward`. Each of them may die at any time; every prompt is trained on exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from examples.rlhf.losses import group_advantages, group_policy_loss
from examples.rlhf.model import load_policy, save_trained
from examples.rlhf.rollout import (
    Batch,
    Sample,
    answer_log_probs,
    collate,
    count_tokens,
    evaluate,
    metrics,
    sample_group,
)
from examples.rlhf.task import Questions, is_right, question

if TYPE_CHECKING:
    from rayzero import Context, Engine, RoleContext


def train(ctx: Context) -> dict[str, Any]:
    """Trains for `ctx.steps` steps, and writes the policy.

    `ctx.args`: `output_dir`; `actor_model_name_or_path`, the folder of the policy to begin with.
    """
    policy, *_ = ctx.initialize(
        model=load_policy(ctx.args["actor_model_name_or_path"]), name="policy"
    )
    loader = ctx.rollouts(Questions(question), policy, collate_fn=collate)
    for batch in loader.until(ctx.steps):
        ctx.report(**metrics(batch))
        update(policy, batch)
    return evaluate(save_trained(policy, ctx.args["output_dir"]))


def update(policy: Engine, batch: Batch) -> None:
    """One step."""
    log_probs = answer_log_probs(policy(batch.tokens), batch.tokens)
    policy.backward(group_policy_loss(log_probs, batch.log_probs, batch.advantages, batch.mask))
    policy.step()


def generate(ctx: RoleContext) -> None:
    """Answers prompts with the newest weights, until the job ends. `ctx.args`:
    `actor_model_name_or_path`, a folder with the policy's config and first weights."""
    policy = load_policy(ctx.args["actor_model_name_or_path"]).to(ctx.device)
    tasks = ctx.tasks(prompts=4)
    for task in tasks:
        ctx.weights.refresh(policy, engine="policy")
        groups = [sample_group(policy, it, tasks.group, ctx.seed) for it in task.prompts]
        task.done(groups)
        ctx.report(tokens=count_tokens(groups))


def score(ctx: RoleContext) -> None:
    """Checks the answers, until the job ends. A task is the group of one prompt."""
    for task in ctx.tasks():
        samples = check_group(task.samples)
        task.done(samples)
        for sample in samples:
            ctx.report(reward=sample.score)  # the page shows mean and spread


def check_group(samples: Sequence[Sample]) -> list[Sample]:
    """The group's samples, with a score of 1 for right answers, and their advantages. Here, and not
    in the trainer, as ranks may get parts of a group."""
    scores = [float(is_right(it.prompt, it.answer)) for it in samples]
    advantages = group_advantages(torch.tensor([scores]))[0].tolist()
    return [
        sample.scored(value, advantage)
        for sample, value, advantage in zip(samples, scores, advantages, strict=True)
    ]
