"""Step 2: a reward model learns which of two answers people prefer.

rayzero run examples/rlhf/reward.yaml
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from examples.rlhf.losses import end_scores, pairwise_loss
from examples.rlhf.model import Scorer, load_scorer, save_trained
from examples.rlhf.task import PAD, Questions, preference

if TYPE_CHECKING:
    from rayzero import Context


def train(ctx: Context) -> dict[str, Any]:
    """Trains for `ctx.steps` steps, and writes the reward model.

    `ctx.args`: `output_dir`; `model_name_or_path`, the folder of the policy to begin with.
    """
    torch.manual_seed(ctx.seed)  # of the new head
    model = load_scorer(ctx.args["model_name_or_path"])
    engine, _, loader, _ = ctx.initialize(model=model, training_data=Questions(preference))
    for pairs in loader.until(ctx.steps):
        engine.backward(pairwise_loss(score_pairs(engine, pairs), pairs, PAD))
        engine.step()
    trained = save_trained(engine, ctx.args["output_dir"])
    return {} if trained is None else {"accuracy": accuracy(trained)}


def score_pairs(scorer: Any, pairs: Tensor) -> Tensor:
    """The scores at each token of pairs (B, 2, T): (B, 2, T)."""
    scores: Tensor = scorer(pairs.flatten(0, 1))
    return scores.view(pairs.shape)


@torch.no_grad()
def accuracy(scorer: Scorer) -> float:
    """The share of held-out pairs whose better answer has the higher score."""
    pairs = torch.stack(list(Questions(preference, held_out=True)))
    scores = end_scores(scorer(pairs.flatten(0, 1)), pairs.flatten(0, 1), PAD).view(-1, 2)
    return (scores[:, 0] > scores[:, 1]).double().mean().item()
