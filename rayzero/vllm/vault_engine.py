"""`VaultWeightTransferEngine`: vLLM's workers read the trainer's weights from their node's memory.

There is no collective and no connection, so a generator that dies or stops does not affect the
trainer, nor the trainer a generator. `VaultWeights`, in the role's process, opens a version's slots
and drives the update. The class here is the part in each of vLLM's workers, which find it by the
backend's name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rayzero.engine.checkpoint.export_model import ExportedModel
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import BlockIndex
from rayzero.workers.vault.records import SlotRef
from rayzero.workers.weights.images import SlotMappings, WeightImage, WeightSource
from rayzero.workers.weights.reader import select_engine


@dataclass
class VaultInitInfo(WeightTransferInitInfo):
    """Empty: all that is needed comes with each update."""


@dataclass
class VaultUpdateInfo(WeightTransferUpdateInfo):
    """One version of the weights, in types of JSON.

    Attributes:
        slots: the slots of all ranks, each as the fields of `SlotRef`.
        paths: the paths of the slots' buffers on this node.
        engine: the name of one of the trainer's engines; None: the first one.
    """

    slots: list[list[Any]]
    paths: list[str]
    engine: str | None = None


class VaultWeightTransferEngine(WeightTransferEngine[VaultInitInfo, VaultUpdateInfo]):
    """The weight transfer engine of a vLLM worker. Its process needs no connection to the job."""

    init_info_cls = VaultInitInfo
    update_info_cls = VaultUpdateInfo
    supports_draft_weight_update = False  # the trainer has the policy's weights alone

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._mappings = SlotMappings()
        self._indexes: dict[int, BlockIndex] = {}
        self._updating = False

    def init_transfer_engine(self, init_info: VaultInitInfo) -> None:
        """Does nothing: there is no connection to open."""

    def start_weight_update(self) -> None:
        """Prepares the layers to be loaded. Abandons an update that was not finished."""
        self._end_update()
        initialize_layerwise_reload(self.model)
        self._updating = True

    def receive_weights(self, update_info: VaultUpdateInfo) -> None:
        """Loads the version, a tensor at a time, with the trainer's names and dtypes.

        Raises:
            SlotGoneError, SlotDamagedError: the version was overwritten while it was read. The
                model then has parts of it, and must not generate before another update.
            EngineError: no update was started, or the slots are another node's.
        """
        if not self._updating:
            raise EngineError(
                "update_weights without start_weight_update", fix="call VaultWeights.refresh()"
            )
        try:
            images = [
                self._open(SlotRef(*ref), path)
                for ref, path in zip(update_info.slots, update_info.paths, strict=True)
            ]
            source = WeightSource(images, self._indexes)
            exported = ExportedModel(select_engine(source, update_info.engine))
            # Tensors with their own memory: vLLM keeps a layer's tensors until it has all of them.
            self.model.load_weights(
                (name, exported.read(name).to(self.device)) for name in exported.sizes()
            )
            source.verify_all()
            self._mappings.end_turn()
        except BaseException:
            self._end_update()
            raise

    def finish_weight_update(self) -> None:
        """Ends the update: the layers are complete."""
        self._end_update()

    def shutdown(self) -> None:
        """Ends an update that was not finished."""
        self._end_update()

    def _end_update(self) -> None:
        if self._updating:
            self._updating = False
            finalize_layerwise_reload(self.model, self.model_config)

    def _open(self, ref: SlotRef, path: str) -> WeightImage:
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise EngineError(
                f"{ref.describe()} cannot be opened: {error}",
                allowed="vLLM's workers on the node of their role's worker, of the same user",
                fix="set distributed_executor_backend: mp in vLLM, with its GPUs on one node",
            ) from error
        try:
            return self._mappings.map(ref, fd)
        finally:
            os.close(fd)
