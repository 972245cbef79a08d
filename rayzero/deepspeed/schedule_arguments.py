"""`deepspeed.runtime.lr_schedules`: names of schedules and parameters, and a schedule from the
command line."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from itertools import chain
from typing import Any

from rayzero.engine.config.schedules import LR_CURVES

KINDS = {
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
}
"""{DeepSpeed's constant: the schedule}."""

_NO_OPTIONS = ("last_batch_iteration", "total_num_steps", "cycle_momentum")
_OPTIONS = {
    kind: [name for name in LR_CURVES[kind].arguments() if name not in _NO_OPTIONS]
    for kind in KINDS.values()
}
_DEFAULTS: dict[str, Any] = {
    **{
        name: field.default
        for kind in KINDS.values()
        for name, field in LR_CURVES[kind].model_fields.items()
    },
    # DeepSpeed's options have other defaults than its classes.
    "lr_range_test_step_size": 1000,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "cycle_momentum": False,
    "warmup_max_lr": 0.001,
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
}
_LEARNING_RATES = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}

CONSTANTS = {
    **{name.upper(): name for names in _OPTIONS.values() for name in names},
    "LR_SCHEDULE": "lr_schedule",
    "TOTAL_NUM_STEPS": "total_num_steps",
    "WARMUP_LOG_RATE": "log",
    "WARMUP_LINEAR_RATE": "linear",
    **KINDS,
}


def add_tuning_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds `--lr_schedule NAME` and an option for each parameter of the schedules; returns the
    parser."""
    group = parser.add_argument_group("Convergence Tuning", "learning rate schedules")
    group.add_argument("--lr_schedule", help=" ".join(KINDS.values()))
    for name in dict.fromkeys([*chain(*_OPTIONS.values()), "cycle_momentum"]):
        default = _DEFAULTS[name]
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
    if kind not in _OPTIONS:
        return None, f"{kind} is not supported LR schedule"
    given = {name: getattr(args, name, None) for name in _OPTIONS[kind]}
    params = {name: value for name, value in given.items() if value is not None}
    return {"type": kind, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The learning rate that a section `scheduler` starts from or rises to, and ""; or None, and
    why there is none."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    kind, params = config["type"], config["params"]
    if kind not in _OPTIONS:
        return None, f"{kind} is not a valid LR schedule"
    if kind == "WarmupCosineLR":
        reason = "scales the optimizer learning rate by a ratio, so its params define no lr"
        return None, f"{kind} {reason}"
    return params[_LEARNING_RATES.get(kind, "warmup_max_lr")], ""
