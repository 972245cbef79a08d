"""Step 1: a policy learns from demonstrations, of which most have a mistake.

rayzero run examples/rlhf/sft.yaml
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from examples.rlhf.losses import supervised_loss
from examples.rlhf.model import ModelConfig, Policy, load_policy, save_trained
from examples.rlhf.rollout import answer_log_probs, answer_mask, evaluate
from examples.rlhf.task import PROMPT_LENGTH, Questions, demonstration

if TYPE_CHECKING:
    from rayzero import Context


def train(ctx: Context) -> dict[str, Any]:
    """Trains for `ctx.steps` steps, and writes the policy.

    `ctx.args`: `output_dir`; `model_name_or_path`, a policy's folder to begin with; without it
    `model`, the fields of a `ModelConfig`.
    """
    torch.manual_seed(ctx.seed)
    folder = ctx.args.get("model_name_or_path")
    policy = load_policy(folder) if folder else Policy(ModelConfig(**ctx.args.get("model", {})))
    engine, _, loader, _ = ctx.initialize(model=policy, training_data=Questions(demonstration))
    for tokens in loader.until(ctx.steps):
        log_probs = answer_log_probs(engine(tokens), tokens)
        engine.backward(supervised_loss(log_probs, answer_mask(tokens[:, PROMPT_LENGTH:])))
        engine.step()
    return evaluate(save_trained(engine, ctx.args["output_dir"]))
