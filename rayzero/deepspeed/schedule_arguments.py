"""`deepspeed.runtime.lr_schedules`: a schedule from the command line."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from rayzero.engine.optim.deepspeed_schedules import VALID_LR_SCHEDULES

_DEFAULTS: Mapping[str, Any] = {
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_momentum": False,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
}
_ALL = tuple(name for name in _DEFAULTS if name != "cycle_momentum")
_PARAMS: Mapping[str, tuple[str, ...]] = {
    "LRRangeTest": tuple(name for name in _ALL if name.startswith("lr_range_test")),
    "OneCycle": tuple(name for name in _ALL if name.startswith(("cycle", "decay"))),
    "WarmupCosineLR": ("warmup_num_steps", "warmup_type", "warmup_min_ratio", "cos_min_ratio"),
}
_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
_LEARNING_RATES = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}


def add_tuning_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds `--lr_schedule NAME` and an option for each parameter of the schedules; returns the
    parser."""
    group = parser.add_argument_group("Convergence Tuning", "learning rate schedules")
    group.add_argument("--lr_schedule", help=" ".join(VALID_LR_SCHEDULES))
    for name, default in _DEFAULTS.items():
        if default is False:
            group.add_argument(f"--{name}", action="store_true")
        else:
            group.add_argument(f"--{name}", type=type(default), default=default)
    return parser


def parse_arguments() -> tuple[Namespace, list[str]]:
    """The options of `add_tuning_arguments` on this process's command line, and the rest of it."""
    return add_tuning_arguments(ArgumentParser()).parse_known_args()


def get_config_from_args(args: Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """The section `scheduler` of a config, and None; or None, and why there is none."""
    kind = getattr(args, "lr_schedule", None)
    if kind is None:
        return None, "--lr_schedule not specified on command line"
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not supported LR schedule"
    given = {name: getattr(args, name, None) for name in _PARAMS.get(kind, _WARMUP)}
    params = {name: value for name, value in given.items() if value is not None}
    return {"type": kind, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The learning rate that a section `scheduler` starts from or rises to, and ""; or None, and
    why there is none."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    kind, params = config["type"], config["params"]
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not a valid LR schedule"
    if kind == "WarmupCosineLR":
        reason = "scales the optimizer learning rate by a ratio, so its params define no lr"
        return None, f"{kind} {reason}"
    return params[_LEARNING_RATES.get(kind, "warmup_max_lr")], ""
