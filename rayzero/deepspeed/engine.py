"""`DeepSpeedEngine`: an `nn.Module` with the names of DeepSpeed's engine, which has an `Engine`.

A name is looked up in this class, in `engine_names.py`, in the engine, and in the model:
`engine.generate` is `engine.module.generate`. The class registers no submodules: every method of
`nn.Module` that is not defined here is the model's. So parameters keep the model's names, and a
module that holds an engine sees the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn

from rayzero.deepspeed.engine_names import CONSTANTS, METHODS, PROPERTIES
from rayzero.deepspeed.lookup import REFUSED, refused_attribute
from rayzero.deepspeed.optimizer import view_optimizer
from rayzero.engine.builder import compile_model, use_batches
from rayzero.engine.checkpoint.export_model import write_model_file
from rayzero.engine.checkpoint_io import is_late, load_model_state, without_frozen
from rayzero.engine.comm.collectives import run_on_all_ranks
from rayzero.engine.curriculum import drop_tokens
from rayzero.engine.data.batch_sizes import BatchSizes
from rayzero.engine.engine import Engine
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.state.load import LoadOptions
from rayzero.engine.step_tracker import Boundary


class DeepSpeedEngine(nn.Module):
    """The engine that `rayzero.initialize` returns. `Engine` has its documentation."""

    _engine: Engine

    __delattr__ = object.__delattr__

    def __init__(self, engine: Engine) -> None:
        object.__setattr__(self, "_engine", engine)

    def __getattribute__(self, name: str) -> Any:
        if name not in _OF_MODEL:
            return object.__getattribute__(self, name)
        if name in REFUSED["DeepSpeedEngine"]:  # the method would replace the engine's parameters
            raise AttributeError(name)  # then `__getattr__` raises an error that says what to use
        return getattr(self._engine.module, name)

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":  # not set yet
            raise AttributeError(name)
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name in PROPERTIES:
            return PROPERTIES[name](self)
        if name in METHODS:
            return partial(METHODS[name], self)
        if hasattr(Engine, name) or name in vars(self._engine):
            return getattr(self._engine, name)
        if name not in _OF_MODEL and hasattr(self._engine.module, name):
            return getattr(self._engine.module, name)
        owner = f"the engine has no {name!r}, and its model neither"
        raise refused_attribute(owner, "DeepSpeedEngine", name, dir(self))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets on the engine what the engine has and this class does not define."""
        is_own = hasattr(type(self), name) or not hasattr(self._engine, name)
        object.__setattr__(self if is_own else self._engine, name, value)

    def __dir__(self) -> list[str]:
        names = (*object.__dir__(self), *CONSTANTS, *PROPERTIES, *METHODS, *dir(self._engine))
        return sorted(set(names))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    forward = __call__

    def train(self, mode: bool = True) -> Self:
        """Sets the model to training mode, or to evaluation mode."""
        self._engine.train(mode)
        return self

    def eval(self) -> Self:
        """Sets the model to evaluation mode."""
        return self.train(False)

    def on_reconfigure(self, callback: Callable[[Any], object]) -> None:
        """See `Engine.on_reconfigure`."""
        own = ref(self)  # weak, so that the engine does not keep this object alive
        self._engine.on_reconfigure(lambda engine: callback(own() or engine))

    # Batch sizes

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the samples per step from the next step on; the micro-batch stays the same.
        Raises ConfigError if `train_batch_size` is not a multiple of micro-batch times ranks;
        EngineError in the middle of a step, or if the engine has a loader, whose sample order
        depends on it."""
        micro, world_size = self.settings.batches.micro_batch, self.world_size
        if train_batch_size < 1 or train_batch_size % (micro * world_size):
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): not a multiple of the micro-batch "
                f"{micro} x {world_size} ranks",
                fix="set another train_batch_size, or call set_train_micro_batch_size first",
            )
        self._set_batch_sizes(micro, train_batch_size // (micro * world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the samples per micro-batch; the micro-steps stay. Raises as the method above."""
        if micro_batch_size < 1:
            raise ConfigError(f"set_train_micro_batch_size({micro_batch_size})", allowed=">= 1")
        self._set_batch_sizes(micro_batch_size, self.settings.batches.micro_steps)

    def _set_batch_sizes(self, micro_batch: int, micro_steps: int) -> None:
        step = self._engine.internals
        mid_step = step.tracker.has_gradients
        if mid_step or self._engine.training_dataloader is not None:
            seen = "in the middle of a step" if mid_step else "with a loader"
            raise EngineError(
                f"the batch size cannot be changed {seen}",
                allowed="between two steps, with batches that the script makes itself",
                fix="set train_batch_size in the config",
            )
        global_batch = micro_batch * micro_steps * self.world_size
        use_batches(step, BatchSizes(global_batch, micro_batch, micro_steps))

    # Accumulation boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Declares whether the next forward and backward are the last of their step.

        From then on the script decides, by calling this again. While it is False, `step` does
        nothing and need not be called. Raises EngineError if every `step` ends a step
        (`managed_gradient_accumulation: false`).
        """
        tracker = self._engine.internals.tracker
        if tracker.boundary is Boundary.STEP:
            raise EngineError(
                "set_gradient_accumulation_boundary() was called, and every step() ends a step",
                fix="set managed_gradient_accumulation: true",
            )
        tracker.boundary = Boundary.LAST if is_boundary else Boundary.NOT_LAST

    def no_sync(self) -> AbstractContextManager[None]:
        """See `Engine.no_sync`. Raises EngineError at stages 2 and 3, where each backward reduces,
        as DeepSpeed does."""
        stage = self.settings.config.zero_optimization.stage
        if stage > 1:
            raise EngineError(
                f"no_sync() was called at stage {stage}, where gradients are sharded and each "
                "backward reduces",
                allowed="stages 0 and 1",
                fix="call set_gradient_accumulation_boundary(False) before all backwards but the "
                "last, or set gradient_accumulation_steps in the config: at every stage",
            )
        return self._engine.no_sync()

    # Optimizer and schedule

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer with DeepSpeed's attributes, such as `loss_scale`; its `optimizer` is
        the torch optimizer itself. The engine's `step()` steps it. None if the engine only
        evaluates."""
        torch_optimizer = self._engine.optimizer
        return None if torch_optimizer is None else view_optimizer(torch_optimizer, self._engine)

    @property
    def lr_scheduler(self) -> Scheduler | None:
        """The learning rate schedule, which the engine's `step()` steps. A script may replace it,
        or set None and step a schedule of its own, as Lightning does."""
        return self._engine.state.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Scheduler | None) -> None:
        self._engine.state.scheduler = scheduler

    def set_lr(self, lr: float) -> None:
        """Sets every parameter group's learning rate, which a schedule overwrites."""
        for group in self._param_groups:
            group["lr"] = lr

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of backwards that no `step` has followed. Otherwise does nothing: the
        first backward of a step replaces the previous step's gradients."""
        self._engine.internals.tracker.zero_grad()

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Callable[[int], int] | Mapping[str, Callable[[int], int]]
    ) -> None:
        """Sets the function, or {"seqlen": function}, that maps a step, from 1, to a sequence
        length. For `curriculum_learning.schedule_type: custom`."""
        given: Any = schedule_func_dict
        inputs = self._engine.internals.scheduled_inputs
        inputs.custom = given if callable(given) else given["seqlen"]

    # Devices and memory

    def to(self, device: torch.device | str | int) -> Self:  # type: ignore[override]
        """Does nothing: the model is on its device. Raises EngineError for another device type."""
        if torch.device(device).type != self.device.type:
            raise EngineError(
                f"engine.to({device!r}) was called, and the model is on {self.device}",
                allowed="the device that initialize chose: this rank's GPU, or the CPU",
            )
        return self

    def offload_states(self, *args: Any, **options: Any) -> None:
        """Does nothing if the engine is on the CPU. Raises ConfigError if it is on a GPU, where its
        buffers stay; `offload_optimizer` keeps state elsewhere."""
        if self.device.type != "cpu":
            raise ConfigError(
                f"engine.offload_states() was called, and the engine is on {self.device}",
                fix='set zero_optimization.offload_optimizer: {"device": "cpu"} in the config',
            )

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the model in place: as a whole at stages 0 to 2, block by block at stage 3.

        Args:
            backend: torch.compile's; by default the config's `compile.backend`.
            compile_kwargs: torch.compile's other arguments, over the config's `compile.kwargs`.
            schedule: DeepCompile's; refused, as is compiled autograd.

        Raises:
            ConfigError: a schedule or compiled autograd is requested.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ConfigError(
                "engine.compile() was given a schedule, or compiled_autograd_enabled",
                allowed="backend and compile_kwargs: forward is compiled, and its backward with it",
            )
        options = dict(compile_kwargs or {}) | ({} if backend is None else {"backend": backend})
        compile_model(self.module, self.settings.config, options)

    def set_dataloader(self, loader: Any) -> None:
        """Sets `training_dataloader`."""
        self._engine.training_dataloader = loader

    # State dicts and checkpoints. Every method is collective.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the full model on rank 0. With `nn.Module`'s arguments, which a module around the
        engine passes, returns the model's own state dict."""
        if args or kwargs:
            return self.module.state_dict(*args, **kwargs)
        return self._engine.state_dict()

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Returns the full model in CPU memory on rank 0, an empty dict on the other ranks."""
        return without_frozen(self.module, self._engine.state_dict(), exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = module_state_dict  # transformers and accelerate call it
    _consolidated_16bit_state_dict = module_state_dict

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Loads weights and buffers from a full state dict, the same one on every rank. Raises
        CheckpointMismatchError if names or shapes differ."""
        load_model_state(self._engine.internals, self.module, state_dict, strict)

    load_state_dict = load_module_state_dict  # type: ignore[assignment]

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the full model, in the dtype of its weights, as one file, at every stage. Sharded
        weights are gathered unit by unit.

        Args:
            save_filename: `*.safetensors` for that format; `torch.load` reads any other file.

        Returns:
            Whether the file was written: see `Engine.save`.
        """
        path = Path(save_dir) / save_filename
        if is_late(self.progress, str(path), self.rank):
            return False
        gathered = self._engine.state_dict(by_new_ranks=False)
        state = without_frozen(self.module, gathered, exclude_frozen_parameters)
        run_on_all_ranks(
            self._engine.internals.runtime.collectives,
            lambda: None if self.rank else write_model_file(state, path),
        )
        return True

    save_fp16_model = save_16bit_model

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """See `Engine.save`. Raises ConfigError without a folder."""
        if save_dir is None or not str(save_dir):
            raise ConfigError(
                f"save_checkpoint({save_dir!r}) was called", allowed="a folder, or a store's URL"
            )
        return self._engine.save(
            save_dir,
            None if tag is None else str(tag),
            client_state=client_state,
            latest=save_latest,
            include_frozen=not exclude_frozen_parameters,
        )

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """See `Engine.load`.

        Args:
            load_module_strict: checkpoint and model must have the same weights. Otherwise the
                weights that both have are loaded.
            load_optimizer_states: also load the optimizer's state, which must have the same parts
                as this optimizer's, and its options, such as lr.
            load_lr_scheduler_states: also load the schedule's position.
            load_module_only: load only weights and buffers.
            custom_load_fn: refused.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...) was given: no rank holds a full state dict",
                fix="pass load_module_strict=False, or call engine.load_module_state_dict(...)",
            )
        options = LoadOptions(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            progress=not load_module_only,
            optimizer_options=True,
        )
        return self._engine.load(load_dir, None if tag is None else str(tag), options)


_OF_MODEL = frozenset(
    name
    for name, value in vars(nn.Module).items()
    if callable(value) and not name.startswith("__") and name not in vars(DeepSpeedEngine)
)
"""`nn.Module`'s methods that are the model's."""
Engine.register(DeepSpeedEngine)  # which has all names of an `Engine`


def convert_to_random_ltd(model: DeepSpeedEngine, convert_type: type[nn.Module]) -> DeepSpeedEngine:
    """Lets the layers of a type drop tokens, as `data_efficiency.data_routing.random_ltd` says. The
    model's modules and names stay. Call this once, after `initialize`. Raises ConfigError if that
    section is not enabled, or the model has too few such layers."""
    if not isinstance(model, DeepSpeedEngine):
        raise ConfigError(
            f"convert_to_random_ltd got a {type(model).__name__}",
            allowed="the engine that initialize returned",
        )
    config = model.settings.config.data_efficiency.token_drop
    if config is None:
        raise ConfigError(
            "convert_to_random_ltd was called, and data_efficiency does not enable random_ltd",
            fix="set data_efficiency.enabled, .data_routing.enabled and .data_routing.random_ltd."
            "enabled: true",
        )
    drop_tokens(model.module, convert_type, config, model.progress)
    return model
