"""A policy and its value function, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ActorCritic(nn.Module):
    """Two small networks over the same observation."""

    def __init__(self, observation: int, actions: int, width: int) -> None:
        super().__init__()
        self.policy = _network(observation, width, actions)
        self.value = _network(observation, width, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Observations (..., observation) to log-probabilities of the actions (..., actions), and
        the expected discounted return (...)."""
        return self.policy(observations).log_softmax(-1), self.value(observations).squeeze(-1)


def _network(inputs: int, width: int, outputs: int) -> nn.Sequential:
    last = nn.Linear(width, outputs)
    with torch.no_grad():
        last.weight.mul_(0.01)  # at first, all actions are about equally likely
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), last)
    )
