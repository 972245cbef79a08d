"""Stands in for the part of vLLM that `rayzero.vllm` uses: it is not installed, it pins its torch.

Written from vLLM's documentation; `test_surface.py` compares names and parameters with it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType, SimpleNamespace
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


class WeightTransferTrainerFactory:
    @classmethod
    def trainer_init(
        cls, init_info: Any, *, client: Any, source: WeightSource | None = None
    ) -> Any:
        """A trainer whose `send_weights` returns what it would send."""
        return SimpleNamespace(send_weights=lambda: list(source or ()), init_info=init_info)


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    rank: int = field(kw_only=True)


@dataclass
class HTTPVLLMWeightSyncClient:
    base_url: str


@dataclass
class WeightTransferConfig:
    backend: str = "nccl"


@dataclass
class SamplingParams:
    n: int = 1
    logprobs: int | None = None


class LLM:
    """One worker in this process, whose model `made` is, and answers in capitals."""

    made: ClassVar[nn.Module]

    def __init__(self, model: str, weight_transfer_config: WeightTransferConfig) -> None:
        device, config = torch.device("cpu"), SimpleNamespace(model_config=None)
        factory = WeightTransferEngineFactory
        self._engine = factory.create_engine(weight_transfer_config, config, device, self.made)
        self.weight_version: str | None = None

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self._engine.init_transfer_engine(self._engine.parse_init_info(request["init_info"]))

    def start_weight_update(self) -> None:
        self._engine.start_weight_update()

    def update_weights(self, request: dict[str, Any]) -> None:
        self._engine.update_weights(request["update_info"])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.finish_weight_update()
        self.weight_version = weight_version

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[str], sampling: SamplingParams) -> list[tuple[str, ...]]:
        return [(f"{it.upper()} {self.weight_version}",) * sampling.n for it in prompts]


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
    *(WeightTransferTrainerFactory, HTTPVLLMWeightSyncClient),
)
MODULES: dict[str, tuple[Any, ...]] = {
    "vllm": (LLM, SamplingParams),
    "vllm.config": (WeightTransferConfig,),
    "vllm.distributed": (),
    "vllm.distributed.weight_transfer": _WEIGHT_TRANSFER,
    "vllm.distributed.weight_transfer.base": _WEIGHT_TRANSFER,
    "vllm.distributed.weight_transfer.nccl_engine": (NCCLTrainerInitInfo,),
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
