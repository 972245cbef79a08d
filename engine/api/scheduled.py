"""`ScheduleMethods`: schedules of learning rates and inputs, and monitors, by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from rayzero.engine.curriculum import drop_tokens
from rayzero.engine.engine import Engine
from rayzero.engine.errors import ConfigError
from rayzero.engine.monitors import Monitors
from rayzero.engine.optim.schedule import Scheduler


class ScheduleMethods(Engine):
    """Part of `DeepSpeedEngine`."""

    @property
    def lr_scheduler(self) -> Scheduler | None:
        """The learning rate schedule, which `step()` steps. It may be replaced; a script that sets
        None steps its own, as Lightning does."""
        return self._step.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Scheduler | None) -> None:
        self._step.scheduler = self.state.scheduler = scheduler

    @property
    def monitor(self) -> Monitors:
        """The config's monitors: `engine.monitor.write_events([(name, value, step)])`."""
        return self._step.meter.monitors

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Callable[[int], int] | Mapping[str, Callable[[int], int]]
    ) -> None:
        """Sets the function that maps a step, from 1, to a sequence length, for
        `curriculum_learning.schedule_type: custom`; or {"seqlen": that function}."""
        given: Any = schedule_func_dict
        self._step.scheduled_inputs.custom = given if callable(given) else given["seqlen"]

    def curriculum_enabled_legacy(self) -> bool:
        return self.settings.config.curriculum_learning.enabled

    def pld_enabled(self) -> bool:
        return self.settings.config.progressive_layer_drop.enabled

    def pld_theta(self) -> float:
        """The probability, now, of keeping a layer."""
        return self._step.scheduled_inputs.keep_probability

    def get_pld_theta(self) -> float:
        return self.pld_theta()


def convert_to_random_ltd(model: ScheduleMethods, convert_type: type[nn.Module]) -> ScheduleMethods:
    """Lets layers of a type drop tokens, as `data_efficiency.data_routing.random_ltd` says; the
    model's modules and names stay. Call it once, after `initialize`. Raises ConfigError if that
    section is not enabled, or the model has too few such layers."""
    if not isinstance(model, ScheduleMethods):
        raise ConfigError(
            f"convert_to_random_ltd got a {type(model).__name__}",
            allowed="the engine that initialize returned",
        )
    config = model.settings.config.data_efficiency.token_drop
    if config is None:
        raise ConfigError(
            "convert_to_random_ltd was called, and data_efficiency does not enable random_ltd",
            fix="data_efficiency.enabled, .data_routing.enabled and .data_routing.random_ltd."
            "enabled: true",
        )
    drop_tokens(model.module, convert_type, config, model.progress)
    return model
