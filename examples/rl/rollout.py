"""Plays episodes of CartPole with the current policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from torch import Tensor

ENVIRONMENT = "CartPole-v1"
LONGEST = 500  # steps, after which an episode is truncated

Policy = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Observations to (log-probabilities, values), as `ActorCritic`."""


@dataclass(frozen=True)
class Rollout:
    """What one update of the policy is computed from; each tensor is (steps, environments)."""

    observations: Tensor  # (steps, environments, observation)
    actions: Tensor
    log_probs: Tensor  # of these actions, when they were chosen
    advantages: Tensor
    returns: Tensor  # what the value function should have predicted
    valid: Tensor  # False where the environment was reset instead of taking the action


class Environments:
    """`count` environments that are stepped together. Episodes go on from rollout to rollout."""

    def __init__(self, count: int, seed: int, device: torch.device) -> None:
        self._envs = gymnasium.make_vec(
            ENVIRONMENT, num_envs=count, vectorization_mode="vector_entry_point"
        )
        self._device = device
        observations, _ = self._envs.reset(seed=seed)
        self._observations = self._to_tensor(observations)
        self._is_over = torch.zeros(count, dtype=torch.bool, device=device)
        self._return_so_far = torch.zeros(count, device=device)
        self.finished: list[float] = []  # returns of the last 100 finished episodes

    @torch.no_grad()
    def play(self, policy: Policy, steps: int, discount: float, decay: float) -> Rollout:
        """Takes `steps` steps with actions drawn from the policy. Calls it `steps` + 1 times:
        with sharded weights that is a collective, so every rank must pass the same number.

        Args:
            discount, decay: gamma and lambda of the advantages (Schulman et al. 2016, eq. 16).
        """
        seen, actions, log_probs, values, rewards, ended, valid = [], [], [], [], [], [], []
        for _ in range(steps):
            choices, value = policy(self._observations)
            action = torch.multinomial(choices.exp(), 1)
            seen.append(self._observations)
            actions.append(action.squeeze(1))
            log_probs.append(choices.gather(1, action).squeeze(1))
            values.append(value)
            valid.append(~self._is_over)
            reward, terminated = self._step(action.squeeze(1))
            rewards.append(reward)
            ended.append(torch.stack([terminated, self._is_over]))
        values.append(policy(self._observations)[1])

        advantages, after = [], torch.zeros_like(values[0])
        for step in reversed(range(steps)):
            terminated, is_over = ended[step].float()
            error = rewards[step] + discount * (1 - terminated) * values[step + 1] - values[step]
            after = error + discount * decay * (1 - is_over) * after
            advantages.append(after)
        advantage = torch.stack(advantages[::-1])
        return Rollout(
            *(torch.stack(seen), torch.stack(actions), torch.stack(log_probs)),
            *(advantage, advantage + torch.stack(values[:-1]), torch.stack(valid)),
        )

    def _step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rewards and whether the episodes terminated. An episode that was over before is
        reset instead: its reward is 0."""
        observations, reward, terminated, truncated, _ = self._envs.step(actions.cpu().numpy())
        rewards = self._to_tensor(reward)
        self._observations = self._to_tensor(observations)
        self._is_over = self._to_tensor(terminated | truncated)
        self._return_so_far += rewards
        self.finished = [*self.finished, *self._return_so_far[self._is_over].tolist()][-100:]
        self._return_so_far[self._is_over] = 0
        return rewards.float(), self._to_tensor(terminated)

    def _to_tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self._device)


@torch.no_grad()
def evaluate(policy: Policy, episodes: int, seed: int, device: torch.device) -> list[float]:
    """Returns of new episodes with the likeliest actions. Calls the policy LONGEST times."""
    envs = gymnasium.make_vec(
        ENVIRONMENT, num_envs=episodes, vectorization_mode="vector_entry_point"
    )
    observations, _ = envs.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    for _ in range(LONGEST):
        choices, _ = policy(torch.from_numpy(observations).to(device))
        observations, reward, terminated, truncated, _ = envs.step(choices.argmax(1).cpu().numpy())
        returns += reward * running
        running &= ~(terminated | truncated)
    return returns.tolist()
