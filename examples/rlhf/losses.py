"""The losses of the whole chain, as functions of tensors.

Shapes: B answers (or pairs) of T tokens. `mask` is (B, T), 1 at an answer's tokens, which come
first, and 0 behind its end. All results are differentiable; scalars are means over the batch.

Where a formula follows DeepSpeed-Chat (`dschat/rlhf/ppo_trainer.py`, `dschat/utils/model/
reward_model.py`), so do its defaults; a test compares them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

KL, CLIP_REWARD, CLIP, DISCOUNT, DECAY = 0.1, 5.0, 0.2, 1.0, 0.95


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of `tokens` (B, T), by the logits (B, T, vocab) at the token before."""
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def supervised_loss(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Mean negative log-probability of the answers' tokens, each answer with the same weight."""
    return -_mean_of_answers(log_probs, mask)


def pairwise_loss(scores: Tensor, tokens: Tensor, pad: int) -> Tensor:
    """The loss of a reward model (Ouyang et al. 2022, eq. 1): -log sigmoid(better - worse).

    As DeepSpeed-Chat, at each token from the first in which the two texts differ to the end of the
    longer one, with the mean of these for each pair.

    Args:
        scores: (B, 2, T), of the better and the worse text of each pair, at each token.
        tokens: (B, 2, T) int64.
    """
    length = tokens.shape[-1]
    differs = tokens[:, 0] != tokens[:, 1]
    first = torch.where(differs.any(1), differs.int().argmax(1), length - 1)
    ends = ((tokens == pad).cumsum(-1) == 0).sum(-1).amax(1)
    last = torch.where(differs.any(1), ends, length)
    places = torch.arange(length, device=tokens.device)
    mask = (places >= first.unsqueeze(1)) & (places < last.unsqueeze(1))
    return _mean_of_answers(-logsigmoid(scores[:, 0] - scores[:, 1]), mask)


def end_scores(scores: Tensor, tokens: Tensor, pad: int) -> Tensor:
    """The score (B,) of a whole text: at its last token. `scores` and `tokens` are (B, T)."""
    ends = ((tokens == pad).cumsum(-1) == 0).sum(-1) - 1
    return scores.gather(-1, ends.unsqueeze(-1)).squeeze(-1)


# Proximal policy optimization (Schulman et al. 2017; Ouyang et al. 2022)


def penalized_rewards(
    log_probs: Tensor,
    reference: Tensor,
    scores: Tensor,
    mask: Tensor,
    kl: float = KL,
    clip: float = CLIP_REWARD,
) -> Tensor:
    """A reward for each token (B, T): the divergence from a reference policy costs at each one, and
    the clipped score of the answer comes at its end.

    As in DeepSpeed-Chat the end is the token behind the mask, where a text's end and padding are
    one token, or the last token of an answer without an end.

    Args:
        log_probs, reference: (B, T), by the policy that has sampled them, and by the reference.
        scores: (B,), of whole answers.
    """
    is_end, until_end = _ends(mask)
    rewards = -kl * (log_probs - reference)
    return until_end * (rewards + is_end * scores.clamp(-clip, clip).unsqueeze(1))


def advantages_and_returns(
    values: Tensor, rewards: Tensor, mask: Tensor, discount: float = DISCOUNT, decay: float = DECAY
) -> tuple[Tensor, Tensor]:
    """Generalized advantages (Schulman et al. 2016, eq. 16), and what the value function should
    have predicted. All are (B, T), without gradients.

    Args:
        values: (B, T), before each token.
        rewards: see `penalized_rewards`, with the same mask.
    """
    values = (values * _ends(mask)[1]).detach()
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    errors = rewards.detach() + discount * following - values
    advantages = torch.zeros_like(values)
    after = torch.zeros_like(values[:, 0])
    for place in reversed(range(values.shape[1])):
        after = errors[:, place] + discount * decay * after
        advantages[:, place] = after
    return advantages, advantages + values


def policy_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: float = CLIP
) -> Tensor:
    """The clipped objective, the mean over all tokens of the batch. All are (B, T).

    Args:
        old: log-probabilities when the tokens were sampled.
    """
    loss = _clipped_loss(log_probs, old, advantages, mask, clip)
    return (loss * mask).sum() / mask.sum()


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float = CLIP
) -> Tensor:
    """Half the squared error of the values, which do not gain by moving more than `clip` away from
    `old`; the mean over all tokens of the batch. All are (B, T)."""
    near = old + (values - old).clamp(-clip, clip)
    worse = torch.maximum((values - returns).square(), (near - returns).square())
    return 0.5 * (worse * mask).sum() / mask.sum()


# Group-relative policy optimization (Shao et al. 2024)


def group_advantages(rewards: Tensor, *, normalize: bool = False) -> Tensor:
    """How much better each answer is than its group: (prompts, group) to the same.

    Args:
        normalize: divides by the group's standard deviation, as in the paper; without it, prompts
            that are nearly solved or nearly hopeless count less (Liu et al. 2025).
    """
    advantages = rewards - rewards.mean(1, keepdim=True)
    if normalize:
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    return advantages


def group_policy_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: float = CLIP
) -> Tensor:
    """The clipped objective with one advantage (B,) for each answer; the mean of each answer's
    tokens. So the loss of a global batch is the mean over ranks, however it is divided."""
    return _mean_of_answers(
        _clipped_loss(log_probs, old, advantages.unsqueeze(1), mask, clip), mask
    )


# Direct preference optimization (Rafailov et al. 2023)


def preference_loss(
    log_probs: Tensor, reference: Tensor, beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:
    """Equation 7 of the paper.

    Args:
        log_probs, reference: (B, 2), of the better and the worse answer of each pair: the sum over
            its tokens.
        label_smoothing: the share of pairs that are taken to be the wrong way round.
    """
    gains = log_probs - reference
    margin = beta * (gains[:, 0] - gains[:, 1])
    right, wrong = logsigmoid(margin), logsigmoid(-margin)
    return -((1 - label_smoothing) * right + label_smoothing * wrong).mean()


def _clipped_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: float
) -> Tensor:
    ratio = ((log_probs - old) * mask).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))


def _mean_of_answers(loss: Tensor, mask: Tensor) -> Tensor:
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


def _ends(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T) each: 1 at the end of each answer, and 1 up to there."""
    places = torch.arange(mask.shape[1], device=mask.device)
    lengths = mask.sum(1, keepdim=True)
    return (places == lengths.clamp(max=mask.shape[1] - 1)).float(), (places <= lengths).float()
