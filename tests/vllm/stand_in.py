"""Stands in for the part of vLLM that `rayzero.vllm` uses: it is not installed, it pins its torch.

Written from vLLM's documentation; `test_surface.py` compares names and parameters with it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable
from unittest import mock

import torch
from torch import Tensor, nn

TInit = TypeVar("TInit")
TUpdate = TypeVar("TUpdate")


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(ABC):
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...

    def held_names(self) -> list[str] | None:
        return None

    def groups(self) -> list[list[str]]:
        return [[it.name] for it in self.metadata()]

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        yield from (([name], [value]) for name, value in self)


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    """Of a backend."""


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    """Of a backend and one update."""


class WeightTransferEngine(ABC, Generic[TInit, TUpdate]):
    init_info_cls: type[TInit]
    update_info_cls: type[TUpdate]

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module):
        self.config = config
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model

    def set_weight_update_target(self, model: nn.Module, model_config: Any) -> None:
        self.model = model
        self.model_config = model_config

    def reset_weight_update_target(self) -> None: ...

    def parse_init_info(self, init_dict: dict[str, Any]) -> TInit:
        return _parse(self.init_info_cls, init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> TUpdate:
        return _parse(self.update_info_cls, update_dict)

    @abstractmethod
    def init_transfer_engine(self, init_info: TInit) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    @abstractmethod
    def receive_weights(self, update_info: TUpdate) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


def _parse(kind: Any, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"invalid {kind.__name__}: {error}") from error


@runtime_checkable
class VLLMWeightSyncClient(Protocol):
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class WeightTransferEngineFactory:
    _registry: ClassVar[dict[str, Callable[[], type]]] = {}

    @classmethod
    def register_engine(
        cls, name: str, module_path_or_cls: str | type, class_name: str | None = None
    ) -> None:
        if name in cls._registry:
            raise ValueError(f"{name} is registered")
        home, kind = module_path_or_cls, class_name
        cls._registry[name] = lambda: getattr(import_module(str(home)), str(kind))

    @classmethod
    def create_engine(
        cls, config: Any, vllm_config: Any, device: torch.device, model: nn.Module
    ) -> Any:
        return cls._registry[config.backend]()(config, vllm_config, device, model)


def initialize_layerwise_reload(model: Any) -> None:
    """What is loaded from now on is held back, as vLLM does for each layer."""
    model.reloading = []


@torch.no_grad()
def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
    """Applies what was loaded, pairs of (target, value)."""
    for target, value in model.reloading:
        target.copy_(value)
    del model.reloading


_WEIGHT_TRANSFER = (
    *(ParamMeta, WeightSource, WeightTransferEngine, WeightTransferInitInfo),
    *(WeightTransferUpdateInfo, VLLMWeightSyncClient, WeightTransferEngineFactory),
)
MODULES: dict[str, tuple[Any, ...]] = {
    "vllm": (),
    "vllm.distributed": (),
    "vllm.distributed.weight_transfer": _WEIGHT_TRANSFER,
    "vllm.distributed.weight_transfer.base": _WEIGHT_TRANSFER,
    "vllm.model_executor": (),
    "vllm.model_executor.model_loader": (),
    "vllm.model_executor.model_loader.reload": (
        initialize_layerwise_reload,
        finalize_layerwise_reload,
    ),
}


@contextmanager
def installed() -> Iterator[None]:
    """Within it `import vllm` finds this."""
    modules = {name: ModuleType(name) for name in MODULES}
    for name, module in modules.items():
        for member in MODULES[name]:
            setattr(module, member.__name__, member)
    with mock.patch.dict(sys.modules, modules):
        yield
