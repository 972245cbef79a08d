"""A model of vLLM's kind, and the plugin in a process that has not called it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from rayzero.workers.roles.reporter import RoleReporter
from rayzero.workers.roles.weights import RoleWeights
from tests.vllm import stand_in
from tests.workers.vault.support import VaultCluster
from tests.workers.weights.support import Told, make_reader


@contextmanager
def with_plugin() -> Iterator[None]:
    """Within it vLLM is the stand-in, and has called its plugins."""
    registry = mock.patch.object(stand_in.WeightTransferEngineFactory, "_registry", {})
    with registry, stand_in.installed():
        from rayzero import vllm

        vllm.register.cache_clear()
        vllm.register()
        yield


class Served(nn.Module):
    """What vLLM would have: two of the trainer's matrices as one, no tied head, other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(37, 5))
        self.fused = nn.Parameter(torch.zeros(33 * 5 + 5 * 33))
        self.while_loading: Callable[[], None] = lambda: None
        self.loads = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps tensors until the update is finished, as vLLM does for the tensors of a layer."""
        self.loads += 1
        halves = {"body.0.weight": slice(0, 165), "body.2.weight": slice(165, 330)}
        for name, value in weights:
            if name == "embed.weight":
                self.while_loading()
                self.reloading.append((self.embed, value))
            elif name in halves:
                self.reloading.append((self.fused.data[halves[name]], value.reshape(-1)))

    def equals(self, net: nn.Module) -> bool:
        fused = torch.cat([net.body[0].weight.reshape(-1), net.body[2].weight.reshape(-1)])
        pairs = ((self.embed, net.embed.weight), (self.fused, fused))
        return all(torch.equal(own, other.to(own.dtype)) for own, other in pairs)


def role_weights(cluster: VaultCluster, told: Told) -> RoleWeights:
    """`ctx.weights` of a role's worker."""
    return RoleWeights(make_reader(cluster, told), RoleReporter(), lambda: (0, 0))
