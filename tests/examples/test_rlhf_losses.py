"""The losses of examples/rlhf against the formulae of DeepSpeed-Chat and of the papers, written
down for one answer and one token at a time, in numbers of Python."""

from __future__ import annotations

from math import exp, log
from statistics import fmean, stdev

import pytest
import torch
from torch import Tensor

from examples.rlhf.losses import (
    advantages_and_returns,
    end_scores,
    group_advantages,
    group_policy_loss,
    pairwise_loss,
    penalized_rewards,
    policy_loss,
    preference_loss,
    supervised_loss,
    token_log_probs,
    value_loss,
)

ANSWERS, LENGTH = 7, 6
Rows = list[list[float]]
pytestmark = pytest.mark.parametrize("seed", range(5))


class Case:
    """Random answers, one without tokens before its end and one that fills all places."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        self.counts = [0, LENGTH, *torch.randint(1, LENGTH, (ANSWERS - 2,), generator=rng).tolist()]
        self.mask = torch.tensor(
            [[float(place < count) for place in range(LENGTH)] for count in self.counts]
        ).double()
        self.log_probs = -draw(ANSWERS, LENGTH).exp()
        self.old = self.log_probs + 0.3 * draw(ANSWERS, LENGTH)
        self.reference = -draw(ANSWERS, LENGTH).exp()
        self.values = draw(ANSWERS, LENGTH)
        self.old_values = self.values + 0.3 * draw(ANSWERS, LENGTH)
        self.returns = draw(ANSWERS, LENGTH)
        self.scores = 6 * draw(ANSWERS)
        self.places = [(row, place) for row in range(ANSWERS) for place in range(LENGTH)]


def chat_rewards(case: Case) -> Rows:
    """`compute_rewards`, and the zeros behind the end of `train_rlhf`."""
    rows = []
    for row, count in enumerate(case.counts):
        rewards = []
        for place in range(LENGTH):
            difference = (case.log_probs[row, place] - case.reference[row, place]).item()
            reward = -0.1 * difference
            if place == min(count, LENGTH - 1):
                reward += max(-5.0, min(5.0, case.scores[row].item()))
            rewards.append(reward if place <= count else 0.0)
        rows.append(rewards)
    return rows


def chat_advantages(case: Case) -> tuple[Rows, Rows]:
    """`get_advantages_and_returns`, as the weighted sum of all later errors instead of a
    recursion."""
    all_rewards = chat_rewards(case)
    advantages, returns = [], []
    for row, count in enumerate(case.counts):
        values = [case.values[row, it].item() if it <= count else 0.0 for it in range(LENGTH)]
        errors = [
            all_rewards[row][it] + (values[it + 1] if it + 1 < LENGTH else 0.0) - values[it]
            for it in range(LENGTH)
        ]
        sums = [
            sum(0.95 ** (later - it) * errors[later] for later in range(it, LENGTH))
            for it in range(LENGTH)
        ]
        advantages.append(sums)
        returns.append([total + value for total, value in zip(sums, values, strict=True)])
    return advantages, returns


def clipped(ratio: float, advantage: float) -> float:
    return max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))


def check(found: Tensor, expected: object) -> None:
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rewards_advantages_and_returns_of_deepspeed_chat(seed: int, dtype: torch.dtype) -> None:
    case = Case(seed)
    args = (case.log_probs, case.reference, case.scores, case.mask)
    rewards = penalized_rewards(*(it.to(dtype) for it in args))
    expected = chat_rewards(case)
    advantages, returns = chat_advantages(case)
    if dtype == torch.float64:  # to 1e-6; a sum of 6 float32 of size 5 has an error of that size
        check(rewards, expected)
        found = advantages_and_returns(case.values.requires_grad_(), rewards, case.mask)
        check(found[0], advantages)
        check(found[1], returns)
        assert not any(it.requires_grad for it in found)
    else:
        values, mask = case.values.float(), case.mask.float()
        for given, wanted in zip(
            advantages_and_returns(values, rewards, mask), (advantages, returns), strict=True
        ):
            torch.testing.assert_close(given, torch.tensor(wanted), rtol=1e-5, atol=1e-5)


def test_clipped_losses_of_deepspeed_chat(seed: int) -> None:
    case = Case(seed)
    policy = value = 0.0
    for row, place in case.places:
        if place >= case.counts[row]:
            continue
        ratio = exp((case.log_probs[row, place] - case.old[row, place]).item())
        policy += clipped(ratio, case.returns[row, place].item())
        new, old = case.values[row, place].item(), case.old_values[row, place].item()
        target = case.returns[row, place].item()
        near = min(max(new, old - 0.2), old + 0.2)
        value += max((new - target) ** 2, (near - target) ** 2) / 2
    total = sum(case.counts)
    check(policy_loss(case.log_probs, case.old, case.returns, case.mask), policy / total)
    check(value_loss(case.values, case.old_values, case.returns, case.mask), value / total)


def test_group_advantages_and_loss(seed: int) -> None:
    case = Case(seed)
    groups = case.returns.tolist()  # the rewards of 7 prompts with 6 answers
    check(group_advantages(case.returns), [[it - fmean(row) for it in row] for row in groups])
    check(
        group_advantages(case.returns, normalize=True),
        [[(it - fmean(row)) / (stdev(row) + 1e-4) for it in row] for row in groups],
    )
    rows = [row for row in range(ANSWERS) if case.counts[row]]
    losses = []
    for row in rows:
        ratios = [
            exp((case.log_probs[row, place] - case.old[row, place]).item())
            for place in range(case.counts[row])
        ]
        losses.append(fmean(clipped(it, case.scores[row].item()) for it in ratios))
    args = (case.log_probs, case.old, case.scores, case.mask)
    check(group_policy_loss(*(it[rows] for it in args)), fmean(losses))


def test_loss_of_a_reward_model_of_deepspeed_chat(seed: int) -> None:
    """Prompts of 2 tokens; 0 is padding. One pair has two equal texts."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 4, (ANSWERS, 2, LENGTH), generator=rng)
    tokens[:, 1, :2] = tokens[:, 0, :2]
    for row in range(ANSWERS):
        for text in range(2):
            tokens[row, text, int(torch.randint(3, LENGTH + 1, (1,), generator=rng)) :] = 0
    tokens[0, 1] = tokens[0, 0]
    scores = torch.randn(ANSWERS, 2, LENGTH, generator=rng, dtype=torch.float64)
    losses, ends = [], []
    for pair, rated in zip(tokens.tolist(), scores.tolist(), strict=True):
        lengths = [text.index(0) if 0 in text else LENGTH for text in pair]
        different = [place for place in range(LENGTH) if pair[0][place] != pair[1][place]]
        places = range(different[0], max(lengths)) if different else [LENGTH - 1]
        losses.append(fmean(log(1 + exp(rated[1][it] - rated[0][it])) for it in places))
        ends += [rated[text][length - 1] for text, length in enumerate(lengths)]
    check(pairwise_loss(scores, tokens, pad=0), fmean(losses))
    check(end_scores(scores.flatten(0, 1), tokens.flatten(0, 1), pad=0), ends)


def test_supervised_and_preference_losses(seed: int) -> None:
    case = Case(seed)
    logits = torch.randn(3, LENGTH, 5, dtype=torch.float64)
    tokens = torch.randint(0, 5, (3, LENGTH))
    weights = logits.exp()
    expected = [
        [
            log(weights[row, place, tokens[row, place]].item() / weights[row, place].sum().item())
            for place in range(LENGTH)
        ]
        for row in range(3)
    ]
    check(token_log_probs(logits, tokens), expected)
    rows = [row for row in range(ANSWERS) if case.counts[row]]
    wanted = -fmean(
        fmean(case.log_probs[row, place].item() for place in range(case.counts[row]))
        for row in rows
    )
    check(supervised_loss(case.log_probs[rows], case.mask[rows]), wanted)

    pairs = case.log_probs[:, :2], case.reference[:, :2]
    losses = []
    for (better, worse), (better_was, worse_was) in zip(
        *(it.tolist() for it in pairs), strict=True
    ):
        margin = 0.3 * ((better - better_was) - (worse - worse_was))
        losses.append(0.9 * log(1 + exp(-margin)) + 0.1 * log(1 + exp(margin)))
    check(preference_loss(*pairs, beta=0.3, label_smoothing=0.1), fmean(losses))
