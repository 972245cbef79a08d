"""The steps of GRPO and PPO in examples/rlhf: engines against plain torch, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from examples.rlhf import grpo, ppo
from examples.rlhf.model import ModelConfig, Policy, Scorer
from examples.rlhf.rollout import Batch, collate, sample_group
from examples.rlhf.task import ANSWER_LENGTH, END, PROMPT_LENGTH, question
from tests.support.ranks import run_ranks

SAMPLES, STEPS, LR = 24, 3, 0.01


def make_policy(seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    return Policy(ModelConfig(width=16)).double()


def make_critic() -> Scorer:
    torch.manual_seed(7)
    return Scorer(ModelConfig(width=16)).double()


def make_batch() -> Batch:
    """Samples of 3 prompts, with random scores and advantages, by somewhat other weights: so that
    ratios are clipped, too."""
    policy = make_policy()
    samples = [it for number in range(3) for it in sample_group(policy, question(number), 8, 0)]
    rng = torch.Generator().manual_seed(0)
    batch = collate(samples)
    log_probs = batch.log_probs + 0.2 * torch.randn(batch.log_probs.shape, generator=rng)
    scores, advantages = torch.randn(2, SAMPLES, generator=rng).double()
    return batch._replace(
        mask=batch.mask.double(), log_probs=log_probs.double(), scores=scores, advantages=advantages
    )


def config(stage: int) -> dict[str, Any]:
    optimizer = {"optimizer": {"type": "SGD", "params": {"lr": LR}}, "gradient_clipping": 0}
    return {"train_batch_size": SAMPLES, "zero_optimization": {"stage": stage}} | optimizer


def answers_of(batch: Batch) -> list[list[int]]:
    """Each to its end."""
    rows = batch.answers.tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


def clipped(new: Tensor, old: Tensor, advantage: float) -> Tensor:
    ratio = (new - old).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))


def gathered(policy: Policy, batch: Batch) -> list[list[Tensor]]:
    """Log-probabilities of the answers' tokens."""
    log_probs = policy(batch.tokens).log_softmax(-1)
    return [
        [log_probs[row, PROMPT_LENGTH - 1 + place, token] for place, token in enumerate(answer)]
        for row, answer in enumerate(answers_of(batch))
    ]


def update_group(rank: int, world: int, stage: int) -> list[float]:
    engine, *_ = rayzero.initialize(model=make_policy(), config=config(stage))
    batch = make_batch()
    part = slice(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    losses = []
    for _ in range(STEPS):
        grpo.update(engine, Batch(*(it[part] for it in batch)))
        losses.append(engine.metrics.loss)
    return losses


@pytest.mark.parametrize(("world", "stage"), [(2, 3), (3, 1)])
def test_group_update_over_ranks(world: int, stage: int) -> None:
    """Also where ranks have parts of groups."""
    policy, batch = make_policy(), make_batch()
    optimizer, losses = torch.optim.SGD(policy.parameters(), lr=LR), []
    for _ in range(STEPS):
        of_answers = []
        for row, tokens in enumerate(gathered(policy, batch)):
            old, advantage = batch.log_probs[row], batch.advantages[row].item()
            terms = [clipped(new, old[place], advantage) for place, new in enumerate(tokens)]
            of_answers.append(torch.stack(terms).mean())
        loss = torch.stack(of_answers).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[2] - losses[0]) > 1e-4
    for found in run_ranks(world, update_group, stage):
        assert found == pytest.approx(losses, rel=1e-9)


def update_both(rank: int, world: int) -> list[list[float]]:
    only_evaluates = {"train_batch_size": SAMPLES}
    reference, *_ = rayzero.initialize(model=make_policy(1), config=only_evaluates)
    actor, *_ = rayzero.initialize(model=make_policy(), config=config(0))
    critic, *_ = rayzero.initialize(model=make_critic(), config=config(0))
    losses = []
    for _ in range(STEPS):
        ppo.update(actor, critic, reference, make_batch())
        losses.append([actor.metrics.loss, critic.metrics.loss])
    return losses


def test_update_of_actor_and_critic() -> None:
    """One answer and one token at a time: the score comes with the end, or with the last token of
    an answer that does not end; the end is trained on as the tokens before it."""
    batch, actor, critic, reference = make_batch(), make_policy(), make_critic(), make_policy(1)
    optimizers = [torch.optim.SGD(it.parameters(), lr=LR) for it in (actor, critic)]
    losses = []
    for _ in range(STEPS):
        actor_terms, critic_terms = [], []
        values, expected = critic(batch.tokens), gathered(reference, batch)
        for row, tokens in enumerate(gathered(actor, batch)):
            old = batch.log_probs[row]
            own = values[row, PROMPT_LENGTH - 1 : PROMPT_LENGTH - 1 + len(tokens)]
            rewards = [
                -0.1 * (old[place] - expected[row][place]).item() for place in range(len(tokens))
            ]
            rewards[-1] += batch.scores[row].clamp(-5, 5).item()
            after = value_after = 0.0
            for place in reversed(range(len(tokens))):
                value = own[place].item()
                after = rewards[place] + value_after - value + 0.95 * after
                value_after = value
                actor_terms.append(clipped(tokens[place], old[place], after))
                critic_terms.append((own[place] - (after + value)).square() / 2)
        both = [torch.stack(actor_terms).mean(), torch.stack(critic_terms).mean()]
        for optimizer, loss in zip(optimizers, both, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append([loss.item() for loss in both])
    assert {ANSWER_LENGTH} < {len(it) for it in answers_of(batch)}, "some end, some do not"
    ((*found,),) = run_ranks(0, update_both)
    for given, wanted in zip(found, losses, strict=True):
        assert given == pytest.approx(wanted, rel=1e-9)
