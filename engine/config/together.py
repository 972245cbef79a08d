"""Keys that cannot stand together: what can be told before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, starmap

from rayzero.engine.config.document import EngineConfig


@dataclass(frozen=True)
class Clash:
    """Keys that contradict each other.

    Attributes:
        path: the key that is named, or two.
        holds: whether a config has this clash.
        says: what is wrong, and what to change.
    """

    path: str
    holds: Callable[[EngineConfig], bool]
    says: str


def _both(one: str, other: str) -> Clash:
    return Clash(
        f"{one} and {other}",
        lambda config: getattr(config, one).enabled and getattr(config, other).enabled,
        'both are enabled; "enabled": false in one of them',
    )


_LARGEST_POWER = 64  # far beyond what any gradient survives


def _dynamic(config: EngineConfig) -> bool:
    return config.fp16.enabled and not config.fp16.loss_scale


_OPTIMIZER = "zero_optimization.offload_optimizer"
_PARAM = "zero_optimization.offload_param"
CLASHES = (
    *starmap(_both, combinations(("fp16", "bf16", "torch_autocast"), 2)),
    Clash(
        "torch_autocast.dtype",
        lambda config: config.torch_autocast.enabled and config.torch_autocast.dtype == "fp32",
        'bf16 or fp16; for fp32 "torch_autocast": false',
    ),
    Clash(
        "data_types.grad_accum_dtype",
        lambda config: config.data_types.grad_accum_dtype == "fp16" and not config.fp16.enabled,
        "fp32 or bf16 without fp16.enabled: without a loss scale gradients below 6e-8 would vanish",
    ),
    Clash(
        "fp16.initial_scale_power",
        lambda config: _dynamic(config) and abs(config.fp16.initial_scale_power) > _LARGEST_POWER,
        f"from {-_LARGEST_POWER} to {_LARGEST_POWER}: it is an exponent of 2",
    ),
    Clash(
        "fp16.min_loss_scale",
        lambda config: _dynamic(config) and not config.fp16.min_loss_scale,
        "more than 0: a scale that is halved for ever never gets there",
    ),
    Clash(
        f"{_PARAM}.device",
        lambda config: (
            config.zero_optimization.offload_param.device == "cpu"
            and config.zero_optimization.stage != 3
        ),
        "model weights can be offloaded at stage 3 only; at the others they are in use as a whole",
    ),
    Clash(
        f"{_PARAM}.device",
        lambda config: config.zero_optimization.offload_param.device == "nvme",
        "refused: every unit would be read from the disk twice in each micro-step; use cpu, and "
        f"{_OPTIMIZER}.device nvme for main weights and optimizer state",
    ),
    Clash(
        f"{_OPTIMIZER}.nvme_path",
        lambda config: (
            config.zero_optimization.offload_optimizer.device == "nvme"
            and not config.zero_optimization.offload_optimizer.nvme_path
        ),
        f"this key is required with {_OPTIMIZER}.device nvme: a folder on a local disk",
    ),
)


def clashes(config: EngineConfig) -> Iterator[str]:
    """A line for every clash in a config."""
    for one in CLASHES:
        if one.holds(config):
            yield f"{one.path}: {one.says}"
