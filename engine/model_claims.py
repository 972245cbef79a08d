"""Records of which engine trains a parameter: two engines would both update it."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import nn
from torch.utils.hooks import RemovableHandle

from rayzero.engine.errors import ConfigError


@dataclass(frozen=True)
class _Claim:
    """The parameters that an engine trains. `hooks` is empty once the engine was closed."""

    engine: ref[Any]
    label: str
    params: tuple[ref[nn.Parameter], ...]
    hooks: list[RemovableHandle]

    @property
    def is_open(self) -> bool:
        return bool(self.hooks) and any(param() is not None for param in self.params)

    def shares(self, ids: Iterable[int]) -> bool:
        """Returns whether the engine trains a parameter with one of these ids."""
        own = {id(reference()) for reference in self.params if reference() is not None}
        return bool(self.hooks) and not own.isdisjoint(ids)


_claims: list[_Claim] = []


def claim_params(
    engine: Any, label: str, params: Iterable[nn.Parameter], hooks: list[RemovableHandle]
) -> None:
    """Records the parameters that an engine trains, until its hooks are removed or the parameters
    are gone."""
    _claims[:] = [claim for claim in _claims if claim.is_open]
    _claims.append(_Claim(ref(engine), label, tuple(map(ref, params)), hooks))


def check_unclaimed(model: nn.Module) -> None:
    """Raises ConfigError if another engine trains parameters of the model. Removes the hooks of an
    engine that was garbage-collected without being closed."""
    ids = {id(param) for param in model.parameters() if param.requires_grad}
    shared = [claim for claim in _claims if claim.shares(ids)]
    if any(claim.engine() is not None for claim in shared):
        gc.collect()  # a reference cycle may be all that holds the engine
    for claim in shared:
        if claim.engine() is not None:
            raise ConfigError(
                f"initialize was given parameters of a model ({type(model).__name__}) that another "
                f"engine trains: {claim.label}; both would take their gradients",
                allowed="one engine for a trainable parameter; frozen ones may be shared",
                fix="call destroy() of the first engine before; several losses of one model need "
                "only one engine",
            )
        for handle in claim.hooks:
            handle.remove()
        claim.hooks.clear()
