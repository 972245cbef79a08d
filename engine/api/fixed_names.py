"""`FixedNames`: names of DeepSpeed's engine whose value or effect is always the same here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from rayzero.engine.builder import make_loader
from rayzero.engine.comm.process_group import one_rank_group
from rayzero.engine.device import device_count
from rayzero.engine.engine import Engine
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import current_session


class FixedNames(Engine):
    """Part of `DeepSpeedEngine`. All ranks are data parallel; no module is DeepSpeed's MoE layer;
    nothing needs to be reduced, released or moved by hand."""

    def get_sequence_parallel_group(self) -> Any:
        """A group of this rank; None without a process group."""
        return one_rank_group()

    @property
    def losses(self) -> float | None:
        """The loss of the last finished step, the mean over the global batch."""
        return self.metrics.loss

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer, without DeepSpeed's attributes; None where there is none."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Does nothing: `backward` reduces gradients, and `step` waits for that."""

    def empty_partition_cache(self) -> None:
        """Does nothing: weights are gathered into buffers that are reused."""

    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Does nothing where the states are in host memory already. Raises ConfigError for an
        engine on a GPU: its buffers stay there, and `offload_optimizer` keeps state elsewhere."""
        if self.device.type != "cpu":
            raise ConfigError(
                f"engine.offload_states() was called, and the engine is on {self.device}",
                fix='zero_optimization.offload_optimizer: {"device": "cpu"} in the config',
            )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Does nothing: `offload_states` moves nothing."""

    def set_dataloader(self, loader: Any) -> None:
        """Sets `training_dataloader`."""
        self.training_dataloader = loader

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader of this rank's samples.

        Args:
            dataset: map-style.
            batch_size: samples of a micro-batch, by default and for training the config's.
            route: "train": the loader of `initialize(training_data=...)`, which continues where the
                job stands; "eval" and "predict": torch's DataLoader, in order, over all ranks.
            data_sampler: for torch's DataLoader, which then loads for training, too.

        Raises:
            ConfigError: another batch size for training.
            DataError: the dataset is not map-style, or empty.
        """
        micro_batch = self.settings.batches.micro_batch
        if route == "train" and data_sampler is None:
            if batch_size not in (None, micro_batch):
                raise ConfigError(
                    f"engine.deepspeed_io(batch_size={batch_size}) was called",
                    allowed=f"None, or the micro-batch of {micro_batch}",
                    fix="train_micro_batch_size_per_gpu in the config, or your own DataLoader",
                )
            return make_loader(self._step, dataset, collate_fn, current_session())
        if data_sampler is None:
            data_sampler = DistributedSampler(
                dataset, num_replicas=self.world_size, rank=self.rank, shuffle=False
            )
        return DataLoader(
            dataset,
            batch_size=batch_size or micro_batch,
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and device_count() > 0,
        )


_FIXED: Mapping[str, Any] = {
    "mpu": None,
    "mp_world_size": 1,
    "has_moe_layers": False,
    "moe_layers": (),
    "num_experts": (),
    "expert_parallel_group": MappingProxyType({}),
    "expert_data_parallel_group": MappingProxyType({}),
    "pipeline_parallelism": False,
    "sequence_parallel_size": 1,
    "enable_backward_allreduce": True,
    "inside_no_sync_ctxt": property(lambda engine: engine._step.tracker.no_sync),
    "dp_world_size": property(lambda engine: engine.world_size),
    "seq_dp_world_size": property(lambda engine: engine.world_size),
    "data_parallel_group": property(lambda engine: dist.group.WORLD),
    "seq_data_parallel_group": property(lambda engine: dist.group.WORLD),
    "seq_parallel_group": property(lambda engine: one_rank_group()),
    "client_optimizer": property(lambda engine: engine.basic_optimizer),
    "client_lr_scheduler": property(lambda engine: engine.lr_scheduler),
    "get_data_parallel_rank": lambda engine: engine.rank,
    "get_model_parallel_rank": lambda engine: 0,
    "get_tensor_parallel_rank": lambda engine: 0,
    "is_deepcompile_enabled": lambda engine: False,  # `compile` uses torch.compile
    "is_deepcompile_active": lambda engine: False,
}
"""{name of DeepSpeed's engine: its value, property or method}."""

for _name, _value in _FIXED.items():
    setattr(FixedNames, _name, _value)
