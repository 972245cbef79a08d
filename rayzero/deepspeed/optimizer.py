"""The optimizer that `initialize` returns: the torch optimizer, with DeepSpeed's attributes.

`view_optimizer` makes a second object that shares the attributes of the torch optimizer, such as
groups and state, so torch's schedulers may drive either object. The second object is an instance of
the torch optimizer's class and of a DeepSpeed class.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from rayzero.engine.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine


def _existing(engine: ref[Engine]) -> Engine:
    if (found := engine()) is None:
        raise EngineError("the optimizer's engine no longer exists")
    return found


class LossScaler:
    """DeepSpeed's view of an engine's loss scale: the factor of the loss in the current step."""

    dynamic = False

    def __init__(self, engine: Engine) -> None:
        self._engine = ref(engine)

    loss_scale = cur_scale = property(lambda self: _existing(self._engine).loss_scale)


class DynamicLossScaler(LossScaler):
    """A scale that adapts to the gradients."""

    dynamic = True


def _refuse_scale(optimizer: object, value: float) -> None:
    raise ConfigError(
        f"the optimizer's loss scale was set to {value}",
        allowed="reading it",
        fix="set fp16.loss_scale in the config, where 0 adapts the scale",
    )


class DeepSpeedOptimizer:
    """Adds the names of DeepSpeed's optimizers to a torch optimizer, whose parameters are this
    rank's flat shards. `engine.step()` steps it."""

    __slots__ = ()
    _engine: ref[Engine]

    optimizer: torch.optim.Optimizer
    """The torch optimizer: the user's own, if `initialize` was given one."""

    loss_scaler: LossScaler

    loss_scale = property(lambda self: self.loss_scaler.loss_scale, _refuse_scale)
    cur_scale = loss_scale
    dynamic_loss_scale = property(lambda self: self.loss_scaler.dynamic)

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped on every rank: a gradient was not finite, or the step
        was lost with a rank."""
        step = _existing(self._engine).internals
        norm = step.meter.last_step.get("grad_norm")
        return step.tracker.lost or (norm is not None and not isfinite(norm))

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """Each group's trained parameters: those of the model, not the flat shards."""
        engine = _existing(self._engine)
        groups: list[list[Tensor]] = [[] for _ in self.optimizer.param_groups]
        for unit in engine.internals.runtime.units:
            if unit.main_weights is not None:
                for extent, param in zip(unit.layout.params, unit.params, strict=True):
                    groups[extent.group].append(param)
        return groups

    bit16_groups = fp16_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls `engine.zero_grad`: the engine owns the gradients."""
        _existing(self._engine).internals.tracker.zero_grad()

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Calls `engine.backward`."""
        _existing(self._engine).backward(loss, retain_graph=retain_graph)


class ZeROOptimizer(DeepSpeedOptimizer):
    """The optimizer at stages 1 to 3."""

    __slots__ = ()


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """The optimizer at stages 1 and 2."""

    __slots__ = ()


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801
    """The optimizer at stage 3."""

    __slots__ = ()


_OF_STAGE = {
    0: DeepSpeedOptimizer,
    1: DeepSpeedZeroOptimizer,
    2: DeepSpeedZeroOptimizer,
    3: DeepSpeedZeroOptimizer_Stage3,
}


def view_optimizer(optimizer: torch.optim.Optimizer, engine: Engine) -> torch.optim.Optimizer:
    """Returns the optimizer with DeepSpeed's names, which refers to the engine weakly."""
    config = engine.settings.config
    kind, names = type(optimizer), _OF_STAGE[config.zero_optimization.stage]
    is_dynamic = config.fp16.enabled and config.fp16.loss_scale == 0
    own = {  # in a class for this object alone, since `optimizer` shares the object's attributes
        "__doc__": kind.__doc__,
        "_engine": ref(engine),
        "optimizer": optimizer,
        "loss_scaler": (DynamicLossScaler if is_dynamic else LossScaler)(engine),
    }
    metaclass: type[type] = type(kind)  # FusedAdam has one of its own
    view: Any = object.__new__(metaclass(kind.__name__, (names, kind), own))
    view.__dict__ = optimizer.__dict__  # one dict for both, so that they cannot differ
    return view  # type: ignore[no-any-return]
