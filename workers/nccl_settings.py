"""The environment variables of NCCL, and of torch's use of it, that repair in place relies on.

A worker sets them when it starts: torch reads its own when it creates a process group, and NCCL
when its library is first called. A variable that the environment sets already is kept, so each can
be overridden: by `workers.env` in the job file, which has precedence, on the cluster's nodes, or in
the environment of a `rayzero run` that starts a local cluster. The variables are not set outside a
job (torchrun, Ray Train): there torch's watchdog ends hangs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from rayzero.engine.errors import ConfigError

_WORDS = dict.fromkeys(("true", "yes", "y", "t", "on"), "1") | dict.fromkeys(
    ("false", "no", "n", "f", "off"), "0"
)


@dataclass(frozen=True)
class NcclSetting:
    """One environment variable, with the value that jobs need.

    Args:
        otherwise: the consequence of another value.
        old_name: the variable's older name, which torch still reads.
        required: no job runs with another value.
    """

    name: str
    value: str
    otherwise: str
    old_name: str = ""
    required: bool = False


NCCL_SETTINGS = (
    NcclSetting(
        "TORCH_NCCL_BLOCKING_WAIT",
        "0",
        "the host waits for every collective, and an abort does not end the wait: a peer's death "
        "hangs the survivors until the timeout",
        old_name="NCCL_BLOCKING_WAIT",
        required=True,
    ),
    NcclSetting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "torch's watchdog ends a surviving process up to 60 s after its peer's death, in the "
        "middle of the repaired job",
        old_name="NCCL_ASYNC_ERROR_HANDLING",
    ),
    NcclSetting(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "torch's monitor ends a surviving process 8 min after a peer's death, also one that was "
        "repaired",
    ),
    NcclSetting(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "0",
        "an error of one group makes the monitor of the next one dump and end the process",
    ),
    NcclSetting(
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "1",
        "freeing a group after an error takes four times as long: up to 60 s of a repair",
    ),
    NcclSetting(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "0",
        "torch's watchdog ends the process at a CUDA error before its cause is reported",
    ),
    NcclSetting(
        "TORCH_NCCL_PROPAGATE_ERROR",
        "0",
        "one rank's error reaches the others through the store as errors of their own",
    ),
    NcclSetting(
        "NCCL_NVLS_ENABLE",
        "0",
        "NVLink SHARP is used, whose memory an aborted communicator may not give back: NVIDIA's "
        "resiliency extension disables it for restarts in one process",
    ),
    NcclSetting(
        "NCCL_CUMEM_ENABLE",
        "1",
        "peers share memory by legacy IPC handles: what a kernel reads of a killed rank's memory "
        "is undefined",
    ),
)
"""All settings but the network interface, which depends on the node (`use_interface`)."""


def apply_nccl_settings(environment: MutableMapping[str, str]) -> None:
    """Sets the variables that are not set yet. Called before torch creates a process group."""
    for setting in NCCL_SETTINGS:
        if setting.old_name not in environment:
            environment.setdefault(setting.name, setting.value)


def use_interface(environment: MutableMapping[str, str], interface: str) -> None:
    """Sets the interface of gloo and NCCL where the environment does not. By default gloo listens
    on the hostname's address, and NCCL on any interfaces: they may belong to another network than
    the one that Ray uses."""
    environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # not as a prefix


def contradictions(environment: Mapping[str, str]) -> Iterator[tuple[NcclSetting, str]]:
    """Yields the settings with another value in the environment, each with its `NAME=value`."""
    for setting in NCCL_SETTINGS:
        for name in filter(None, (setting.name, setting.old_name)):
            value = environment.get(name, setting.value).strip().lower()
            if _WORDS.get(value, value) != setting.value:
                yield setting, f"{name}={environment[name]}"


def check_nccl_settings(environment: Mapping[str, str]) -> None:
    """Raises ConfigError if the environment contradicts a setting without which no fault can be
    repaired."""
    for setting, seen in contradictions(environment):
        if setting.required:
            raise ConfigError(
                f"{seen} in the environment of the workers: {setting.otherwise}",
                allowed=f"{setting.name}={setting.value}, or unset",
                fix="correct workers.env in the job file, or the cluster nodes' environment",
            )
