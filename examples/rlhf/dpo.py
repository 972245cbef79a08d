"""Step 2, the short way: a policy learns from preferences without a reward model.

rayzero run examples/rlhf/dpo.yaml
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from examples.rlhf.losses import preference_loss
from examples.rlhf.model import load_policy, save_trained
from examples.rlhf.rollout import answer_log_probs, answer_mask, evaluate
from examples.rlhf.task import PROMPT_LENGTH, Questions, preference

if TYPE_CHECKING:
    from rayzero import Context


def train(ctx: Context) -> dict[str, Any]:
    """Trains for `ctx.steps` steps, and writes the policy.

    `ctx.args`: `output_dir`; `model_name_or_path`, the folder of the policy to begin with, which is
    the reference, too; `reference`, the engine config of that; `beta`, 0.1; `label_smoothing`, 0.
    """
    folder, beta = ctx.args["model_name_or_path"], ctx.args.get("beta", 0.1)
    reference, *_ = ctx.initialize(
        model=load_policy(folder), config=ctx.args["reference"], name="reference"
    )
    engine, _, loader, _ = ctx.initialize(
        model=load_policy(folder), training_data=Questions(preference)
    )
    smoothing = ctx.args.get("label_smoothing", 0.0)
    for pairs in loader.until(ctx.steps):
        with torch.no_grad():
            expected = pair_log_probs(reference, pairs)
        log_probs = pair_log_probs(engine, pairs)
        engine.backward(preference_loss(log_probs, expected, beta, smoothing))
        engine.step()
    return evaluate(save_trained(engine, ctx.args["output_dir"]))


def pair_log_probs(policy: Any, pairs: Tensor) -> Tensor:
    """Sums over the answers of pairs (B, 2, T): (B, 2)."""
    tokens = pairs.flatten(0, 1)
    log_probs = answer_log_probs(policy(tokens), tokens) * answer_mask(tokens[:, PROMPT_LENGTH:])
    return log_probs.sum(1).view(-1, 2)
