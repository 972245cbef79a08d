"""`deepspeed.moe.utils` where no parameter is an expert's: experts are ordinary modules here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from rayzero.engine.errors import ConfigError

ParamGroup = dict[str, Any]


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """(False, 0): no module is DeepSpeed's MoE layer."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Whether a script marked a parameter as an expert's, as DeepSpeed's MoE layer does."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: ParamGroup) -> bool:
    """Whether a group is marked as an expert's."""
    return bool(param_group.get("moe", False))


def _check_dense(params: Iterable[Tensor]) -> None:
    if any(map(is_moe_param, params)):
        raise ConfigError(
            "a parameter has allreduce=False: DeepSpeed would not average its gradient over all "
            "ranks",
            allowed="experts as ordinary modules, on every rank",
        )


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(all of them, none). Raises ConfigError for an expert's parameter, as the functions below."""
    shared = list(params)
    _check_dense(shared)
    return shared, []


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[Tensor], list[Tensor]]:
    """(all gradients there are, none)."""
    shared, _ = split_params_into_shared_and_expert_params(group)
    return [param.grad for param in shared if param.grad is not None], []


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: ParamGroup | Sequence[ParamGroup], max_group_size: int | None = None
) -> list[ParamGroup]:
    """The groups as they are, as a list. `max_group_size` has no effect: it splits experts'."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = list(group["params"])
        _check_dense(group["params"])
    return groups


def configure_moe_param_groups(model_parameters: list[Any]) -> list[ParamGroup]:
    """Parameters as a list of one group, groups as they are."""
    if model_parameters and not isinstance(model_parameters[0], dict):
        model_parameters = [{"params": model_parameters, "name": "dense-params"}]
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
