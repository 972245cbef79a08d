"""Samples: answers that a policy gives to prompts, and the batches that are made of them.

What is sampled depends on the weights, the seed, the prompt and the place in its group alone: each
answer has random numbers of its own, and each group a forward of its own, since the last bits of a
product of matrices may depend on how many rows it has. So it is the same with any number of
generators, and however many prompts are in a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from examples.rlhf.losses import token_log_probs
from examples.rlhf.model import Cache, Policy
from examples.rlhf.task import (
    ANSWER_LENGTH,
    END,
    PAD,
    PROMPT_LENGTH,
    Prompt,
    Questions,
    encode,
    is_right,
    question,
)


@dataclass(frozen=True)
class Sample:
    """An answer, and what was found out about it."""

    prompt: Prompt
    answer: Tensor  # (ANSWER_LENGTH,) int64, filled up with PAD
    log_probs: Tensor  # (ANSWER_LENGTH,), of these tokens when they were sampled; 0 at PAD
    score: float = 0.0
    advantage: float = 0.0

    def scored(self, score: float, advantage: float = 0.0) -> Sample:
        return replace(self, score=score, advantage=advantage)

    @property
    def tokens(self) -> Tensor:
        """Prompt and answer: (LENGTH,) int64."""
        return torch.cat([encode(self.prompt.text), self.answer])


class Batch(NamedTuple):
    """The inputs of a step. B answers of T tokens, with PAD behind the end."""

    tokens: Tensor  # (B, PROMPT_LENGTH + T) int64
    mask: Tensor  # (B, T) float32: 1 at the answer's tokens, with its end
    log_probs: Tensor  # (B, T), of the answer's tokens when they were sampled
    scores: Tensor  # (B,)
    advantages: Tensor  # (B,)
    is_right: Tensor  # (B,) float32: what the judge may not know; only to be reported

    @property
    def answers(self) -> Tensor:
        """(B, T) int64"""
        return self.tokens[:, PROMPT_LENGTH:]


@torch.no_grad()
def sample_group(policy: Policy, prompt: Prompt, group: int, seed: int) -> list[Sample]:
    """`group` answers to one prompt, at temperature 1."""
    device = policy.head.weight.device
    draws = torch.stack([_draws(seed, prompt.number, member) for member in range(group)])
    read = encode(prompt.text).expand(group, -1).to(device)
    answers, log_probs = _extend(policy, read, draws.to(device))
    rows = zip(answers.cpu(), log_probs.cpu(), strict=True)
    return [Sample(prompt, answer.clone(), each.clone()) for answer, each in rows]


def _draws(seed: int, number: int, member: int) -> Tensor:
    """Random numbers of one answer, on the CPU: the same on every device and in every process."""
    generator = torch.Generator().manual_seed(hash((seed, number, member)) % 2**63)
    return torch.rand(ANSWER_LENGTH, generator=generator)


def _extend(policy: Policy, read: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
    """Answers (B, ANSWER_LENGTH) to prompts (B, PROMPT_LENGTH), and their log-probabilities.

    Args:
        draws: (B, ANSWER_LENGTH), uniform in [0, 1): each selects the token at this place of the
            cumulative distribution. None: the likeliest tokens.
    """
    cache = Cache()
    is_over = torch.zeros(len(read), dtype=torch.bool, device=read.device)
    answer, chosen = [], []
    for place in range(ANSWER_LENGTH):
        log_probs = policy(read, cache)[:, -1].log_softmax(-1)
        if draws is None:
            token = log_probs.argmax(-1)
        else:
            below = log_probs.exp().cumsum(-1) <= draws[:, place, None]
            token = below.sum(-1).clamp(max=log_probs.shape[-1] - 1)  # the sum may be 1 - epsilon
        token = token.masked_fill(is_over, PAD)
        answer.append(token)
        chosen.append(log_probs.gather(-1, token[:, None])[:, 0].masked_fill(is_over, 0.0))
        is_over = is_over | (token == END)
        read = token[:, None]
    return torch.stack(answer, 1), torch.stack(chosen, 1)


def count_tokens(groups: Sequence[Sequence[Sample]]) -> int:
    """Tokens that were sampled, ends included."""
    return sum(int(answer_mask(it.answer).sum()) for group in groups for it in group)


def collate(samples: Sequence[Sample]) -> Batch:
    """A batch of samples."""
    answers = torch.stack([it.answer for it in samples])
    return Batch(
        tokens=torch.stack([it.tokens for it in samples]),
        mask=answer_mask(answers),
        log_probs=torch.stack([it.log_probs for it in samples]),
        scores=torch.tensor([it.score for it in samples]),
        advantages=torch.tensor([it.advantage for it in samples]),
        is_right=torch.tensor([float(is_right(it.prompt, it.answer)) for it in samples]),
    )


def metrics(batch: Batch) -> dict[str, float]:
    """Returns metrics for the job's page."""
    return {
        "reward": batch.scores.mean().item(),
        "exact_match": batch.is_right.mean().item(),
        "answer_tokens": batch.mask.sum(1).mean().item(),
    }


def answer_mask(answers: Tensor) -> Tensor:
    """1.0 at tokens up to the end of each answer, 0.0 behind it: (..., T) to (..., T)."""
    ended = (answers == END).int()
    return (ended.cumsum(-1) - ended == 0).float()


def answer_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities (B, T) of the answers in `tokens` (B, PROMPT_LENGTH + T), by the logits of
    a policy that has read them."""
    return token_log_probs(logits[:, :-1], tokens[:, 1:])[:, PROMPT_LENGTH - 1 :]


def evaluate(policy: Policy | None) -> dict[str, float]:
    """The share of held-out questions that a policy answers exactly right, with one answer for
    each: sampled as in training, and the likeliest. Empty on ranks that do not have the policy."""
    if policy is None:
        return {}
    prompts = list(Questions(question, held_out=True))
    draws = torch.stack([_draws(0, it.number, 0) for it in prompts])
    return {
        "exact_match": exact_match(policy, prompts, draws),
        "exact_match_greedy": exact_match(policy, prompts, None),
    }


@torch.no_grad()
def exact_match(policy: Policy, prompts: Sequence[Prompt], draws: Tensor | None) -> float:
    """The share of prompts with the right answer; `draws` as of `_extend`."""
    read = torch.stack([encode(it.text) for it in prompts])
    answers, _ = _extend(policy, read, draws)
    return sum(map(is_right, prompts, answers)) / len(prompts)
