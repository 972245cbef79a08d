"""`Engine`: trains one model on all ranks of a ZeRO data-parallel group.

`builder` chooses its parts. `rayzero.deepspeed.engine` has DeepSpeed's names over it.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rayzero.engine.builder import SchedulerLike, build_training_step, make_loader, make_model
from rayzero.engine.checkpoint_io import load_checkpoint, save_checkpoint
from rayzero.engine.config.explain import log_explanation
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.sample_source import MapDataset
from rayzero.engine.data.streams.block import BlockSource
from rayzero.engine.data.streams.readers import IterableStream
from rayzero.engine.data.streams.source import BlockStream
from rayzero.engine.metrics import StepMetrics
from rayzero.engine.model_claims import check_unclaimed, claim_params
from rayzero.engine.optim.build import NoOptimizer, OptimizerLike
from rayzero.engine.recut import GroupSurvival
from rayzero.engine.session import NO_HOST, current_session
from rayzero.engine.settings import ConfigLike, Settings, resolve_config
from rayzero.engine.state.load import LOAD_ALL, LoadOptions
from rayzero.engine.state.save import full_state_dict, iterate_full_params
from rayzero.engine.training_step import TrainingStep
from rayzero.engine.zero.unit import Unit

_engines: WeakKeyDictionary[Engine, None] = WeakKeyDictionary()


class Engine(metaclass=ABCMeta):  # noqa: B024 -- for `register`
    """Trains one model on all ranks. Built by `Engine.build`, or by `rayzero.initialize`, whose
    class with DeepSpeed's names is registered as a subclass.

    Every rank must make the same calls in the same order: any of them may hold collectives.

    Example:
        >>> engine = Engine.build(model, torch.optim.AdamW, config={"train_batch_size": 64})
        >>> for batch in loader:
        ...     loss = engine(batch)
        ...     engine.backward(loss)
        ...     engine.step()

    Attributes:
        module: the model. Its parameters are views of the engine's buffers.
        progress: finished steps, micro-steps, samples.
        state: the training state that is saved and restored, as named ranges.
        training_dataloader: the loader of `build(training_data=...)`.
    """

    training_dataloader: StepLoader | None = None

    def __init__(self, module: nn.Module, step: TrainingStep) -> None:
        self.module = module
        self.progress = step.state.progress
        self.state = step.state
        self._step = step
        self._runtime = step.runtime
        self._on_reconfigure: list[Callable[[Engine], object]] = []
        _engines[self] = None
        stage = step.settings.config.zero_optimization.stage
        units = [unit for unit in self._runtime.units if unit.grads is not None]
        claim_params(
            self,
            f"that of {type(module).__name__}, at stage {stage}",
            [param for unit in units for param in unit.params],
            self._runtime.hooks,
        )

    @classmethod
    def build(
        cls,
        model: nn.Module | Callable[[], nn.Module] | None,
        optimizer: OptimizerLike | None = None,
        *,
        config: ConfigLike | None = None,
        model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        training_data: MapDataset | BlockStream | BlockSource | IterableStream | None = None,
        lr_scheduler: SchedulerLike | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        name: str | None = None,
    ) -> Self:
        """Builds an engine. Collective: every rank calls it with the same arguments.

        Args:
            model: the model, the same on every rank (rank 0's values are used), or a function that
                builds it, which is called without allocating its memory (`zero_init`). Not None.
            optimizer: a new torch optimizer over the model's parameters, or a function that makes
                one from parameter groups; by default the config's. Without either, the model is
                frozen and the engine only evaluates.
            config: an `EngineConfig`, a dict with DeepSpeed's keys, or the path of a JSON file; by
                default the rayzero job's. With neither config nor optimizer: AdamW at lr 1e-3.
            model_parameters: parameters or parameter groups to train; by default the optimizer's,
                or all that require gradients.
            training_data: a map-style dataset, or a stream (`rayzero.data`); None if the script
                makes its own batches.
            lr_scheduler: a scheduler of the optimizer, or a function that makes one. The engine
                calls its `step` once per step.
            collate_fn: makes a batch from a list of samples.
            name: the engine's name, such as `critic`, in a job that trains several: its state is
                stored and found under this name. By default, the order of construction tells
                engines apart: the first has no name, the next is `engine2`.

        Raises:
            ConfigError: config, model, optimizer and ranks do not fit together.
            DataError: the dataset is empty, or not map-style.
        """
        host = current_session() or NO_HOST
        parsed = resolve_config(config, optimizer, lr_scheduler, host)
        trains = optimizer is not None or parsed.config.optimizer is not None
        session = host.session_for(name, trains=trains)
        module = make_model(model)
        check_unclaimed(module)
        with ExitStack() as undo:
            step = build_training_step(
                parsed.config, module, optimizer, model_parameters, lr_scheduler, session, undo
            )
            engine = cls(module, step)
            engine.state.engine_name = name
            if training_data is not None:
                engine.training_dataloader = make_loader(step, training_data, collate_fn)
            session.on_engine_ready(engine)
            undo.pop_all()
        if engine.rank == 0:
            log_explanation(parsed)
        return engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model's forward; inputs are cast to the precision of the weights."""
        output = self._step.forward(self.module, args, kwargs)
        if not torch.is_grad_enabled():  # in an evaluation, no backward ends the phase
            self._step.meter.phases.leave()
        return output

    forward = __call__

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Computes gradients, and starts to reduce them over the ranks.

        Args:
            loss: a scalar, the mean over this rank's micro-batch, or a model output with a `loss`
                attribute. Gradients are averaged over the global batch by sample count; do not
                divide by ranks or accumulation steps.
            retain_graph: as in `torch.autograd.backward`.
            scale_wrt_gas: False if the loss is already divided by the accumulation steps.

        Returns:
            The loss as it was given, divided by the accumulation steps with `scale_wrt_gas`.

        Raises:
            EngineError: not a scalar with a graph, or there is no optimizer; or the loader's
                micro-batches are not trained on in their order, each once (`data.micro_batches`).
        """
        loss = getattr(loss, "loss", loss)
        micro_steps = self.settings.batches.micro_steps
        factor = 1.0 if scale_wrt_gas else float(micro_steps)
        self._step.backward(loss, retain_graph=retain_graph, factor=factor)
        return loss if micro_steps == 1 or not scale_wrt_gas else loss.detach() / micro_steps

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the loss scale, for `engine.scale(loss).backward()`. Needed in
        fp16; elsewhere it only reports the loss to the metrics. Raises EngineError as `backward`
        does."""
        return self._step.scale(loss)

    def step(self, lr_kwargs: None = None) -> None:
        """Ends a micro-step; at the end of a step, updates the weights on every rank.

        If the gradient is not finite on any rank, the step is skipped on all of them: only the
        loss scale changes, and `metrics.skipped_steps` counts it.

        Args:
            lr_kwargs: accepted for DeepSpeed's signature, not used.

        Raises:
            EngineError: no `backward` since the last `step`, or inside `no_sync`; or a gradient is
                not finite at the lowest loss scale.
        """
        self._step.step()

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which `backward` only accumulates; call `step` after one more
        backward outside of it. Raises EngineError inside another `no_sync`."""
        return self._step.tracker.without_sync()

    def state_dict(self, *, by_new_ranks: bool = True) -> dict[str, Tensor]:
        """Returns the full model in CPU memory on rank 0, an empty dict on other ranks. Collective.

        Args:
            by_new_ranks: False if the script makes this call after each epoch, and a new rank does
                not repeat the calls of epochs that had ended before it joined.
        """
        self._step.meter.phases.enter("gather")
        return self._step.reforming.with_peers(
            lambda: full_state_dict(self.module, self._runtime), by_new_ranks=by_new_ranks
        )

    def iterate_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full parameter) on every rank, on its device, in the order of
        `module.named_parameters()`: for code that sends the model elsewhere. Collective: every rank
        iterates to the end before it trains on. A value may be the engine's own memory: do not
        change it, and copy what you keep."""
        self._step.meter.phases.enter("gather")
        with_peers = self._step.reforming.with_peers
        return iterate_full_params(self.module, self._runtime, with_peers)

    def save(
        self,
        folder: str | Path,
        tag: str | None = None,
        *,
        client_state: Mapping[str, Any] | None = None,
        latest: bool = True,
        include_frozen: bool = True,
    ) -> bool:
        """Writes the training state to `<folder>/<tag>`; returns when it is durable. Collective.

        The state is that of the last finished step: gradients accumulated since then are not
        saved. It can be loaded at any stage and world size.

        Args:
            folder: a path, or the URL of a store.
            tag: `global_step<n>` by default; the same on every rank.
            client_state: the script's own values; rank 0's are saved, as JSON and tensors (see
                `rayzero.engine.state.client_state`), never pickled.
            latest: `load` without a tag loads this checkpoint from now on.
            include_frozen: also save parameters that do not require gradients.

        Returns:
            Whether the state was written. A launched script that is run again does not write at the
            end of an epoch that was finished and saved before.

        Raises:
            EngineError: `client_state` holds what cannot be saved; or another rank failed.
            StoreError: the store cannot be written.
        """
        name = f"global_step{self.progress.step}" if tag is None else tag
        return save_checkpoint(
            self._step,
            str(folder),
            name,
            client_state=dict(client_state or {}),
            latest=latest,
            include_frozen=include_frozen,
        )

    def load(
        self, folder: str | Path, tag: str | None = None, options: LoadOptions = LOAD_ALL
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads a training state that was saved at any stage and world size. Collective.

        Args:
            folder: what `save` was given, a rayzero job's checkpoint folder, or a folder that
                DeepSpeed wrote at ZeRO stages 1 to 3.
            tag: by default the one in the file `latest`, else the newest complete checkpoint.
            options: which parts to load.

        Returns:
            (path, client state); (None, None), with a warning, if the folder has no checkpoint and
            no tag was given.

        Raises:
            DataError: the checkpoint is damaged, or that tag does not exist.
            CheckpointMismatchError: it was saved from another model.
            EngineError: another rank failed. This rank's state may then be partly loaded.
        """
        return load_checkpoint(self._step, str(folder), tag, options)

    @property
    def step_is_due(self) -> bool:
        """Whether a backward has run whose `step()` updates the weights, or counts a micro-step."""
        return self._step.tracker.step_pending and not self._step.tracker.zeroed

    @contextmanager
    def clipping_to(self, max_norm: float) -> Iterator[None]:
        """Makes `step()` in this context clip to `max_norm` (L2), not to the config's; 0: never."""
        settings = self._step.settings
        config = settings.config.model_copy(update={"gradient_clipping": max_norm})
        self._step.settings = replace(settings, config=config)
        try:
            yield
        finally:
            self._step.settings = settings

    def train(self, mode: bool = True) -> Self:
        """Sets the model to training mode, or to evaluation mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Sets the model to evaluation mode."""
        return self.train(False)

    def on_reconfigure(self, callback: Callable[[Engine], object]) -> None:
        """Registers a function that is called with the engine when the ranks change and this rank
        stays. It must not call collectives: new ranks do not call the function."""
        self._on_reconfigure.append(callback)

    @property
    def survival(self) -> GroupSurvival:
        """The interface by which the host keeps the engine beyond its process group."""
        return GroupSurvival(self._step, self.module, self._after_recut)

    def _after_recut(self) -> None:
        vars(self).pop("_param_units", None)
        for callback in self._on_reconfigure:
            callback(self)

    def close(self) -> None:
        """Removes the model's hooks, closes files, and ends the loader's processes. The engine
        cannot be used afterwards."""
        if isinstance(loader := self.training_dataloader, StepLoader):
            loader.close()
        self._step.close()
        self._step.meter.session.on_engine_closed()

    @property
    def metrics(self) -> StepMetrics:
        """Loss, norm, times, bytes and traffic, as of the last finished step."""
        return self._step.meter.metrics

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer, which `step()` steps: do not step it yourself. None if the engine
        only evaluates."""
        sharded = self._step.optimizer
        return None if isinstance(sharded, NoOptimizer) else sharded.torch_optimizer

    @property
    def settings(self) -> Settings:
        """Sizes and limits of this run, and the checked config."""
        return self._step.settings

    @property
    def internals(self) -> TrainingStep:
        """The engine's parts, for rayzero's own adapters. They change between versions."""
        return self._step

    @property
    def loss_scale(self) -> float:
        """The factor that multiplies the loss of the current step in fp16; 1 otherwise."""
        return self._step.loss_scale

    @cached_property
    def _param_units(self) -> dict[int, tuple[Unit, int] | None]:
        """{id of a parameter: (unit, index in it)}; None for a frozen one that every rank holds."""
        units: dict[int, tuple[Unit, int] | None] = dict.fromkeys(map(id, self.module.parameters()))
        for unit in self._runtime.units:
            units |= {id(param): (unit, index) for index, param in enumerate(unit.params)}
        return units

    @property
    def device(self) -> torch.device:
        return self._runtime.collectives.device

    @property
    def rank(self) -> int:
        return self._runtime.collectives.rank

    @property
    def world_size(self) -> int:
        return self._runtime.collectives.world_size


def find_engine(param: nn.Parameter) -> tuple[Engine, tuple[Unit, int] | None] | None:
    """Returns the newest engine that has this parameter, with (unit, index in it): None for a
    frozen parameter that every rank holds in full. Returns None if no engine has the parameter."""
    for engine in list(_engines)[::-1]:
        units = engine._param_units
        if id(param) in units:
            return engine, units[id(param)]
    return None
