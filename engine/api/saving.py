"""An engine's checkpoints, by DeepSpeed's names, in rayzero's format (docs/checkpoints.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rayzero.engine.api.found import find_checkpoint, open_found
from rayzero.engine.checkpoint.imports.tensors import Piece, TensorSource
from rayzero.engine.checkpoint.names import stays_below
from rayzero.engine.checkpoint.whole_file import write_whole
from rayzero.engine.comm.messages import together
from rayzero.engine.errors import ConfigError
from rayzero.engine.settings import Settings
from rayzero.engine.state.client_state import decode, encode
from rayzero.engine.state.load import Choice
from rayzero.engine.state.save import Saver
from rayzero.engine.state.training import TrainingState
from rayzero.engine.zero.runtime import ZeroRuntime

log = logging.getLogger("rayzero.engine")


class Saving:
    """The part of `Engine` that saves and loads. Every method is collective."""

    module: nn.Module
    state: TrainingState
    _runtime: ZeroRuntime
    _settings: Settings

    def state_dict(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def _forget_gradients(self) -> None:
        raise NotImplementedError

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the whole training state to `<save_dir>/<tag>`; returns when it is durable.

        It is that of the last finished step: gradients accumulated since then are not in it. It can
        be loaded at any stage and world size, and by everything that knows rayzero's checkpoints.

        Args:
            save_dir: a path, or a URL of a store.
            tag: `global_step<n>` by default; the same on every rank.
            client_state: the script's own values; rank 0's are kept. Not pickled: see
                `rayzero.engine.state.client_state` for what can be kept.
            save_latest: `load_checkpoint` without a tag loads this one from then on.
            exclude_frozen_parameters: leave out what does not require gradients.

        Returns:
            True.

        Raises:
            EngineError: `client_state` holds what cannot be kept; or another rank failed.
            StoreError: the store cannot take it.
        """
        name = f"global_step{self.state.progress.step}" if tag is None else str(tag)
        script = dict(client_state or {})
        answers = self._together(lambda: [_checked(name), encode(script)])
        if len({one for one, _ in answers}) > 1:
            raise ConfigError(
                f"save_checkpoint got different tags: {sorted({one for one, _ in answers})}",
                allowed="the same tag on every rank",
            )
        saver = Saver(
            self.state, self._runtime.collectives, self._settings.device, self._settings.stage
        )
        saver.save(
            str(save_dir),
            name,
            answers[0][1],
            latest=save_latest,
            frozen=not exclude_frozen_parameters,
        )
        return True

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
        """Takes over a training state that was saved at any stage and world size.

        Args:
            load_dir: what `save_checkpoint` got, a rayzero job's folder of checkpoints, or a folder
                that DeepSpeed wrote at ZeRO stages 1 to 3.
            tag: which one; by default what `latest` names, else a job's newest whole one.
            load_module_strict: the same weights must be in both; without, those that are.
            load_optimizer_states: also the optimizer's state, and its options, such as lr.
            load_lr_scheduler_states: also the schedule's place.
            load_module_only: weights and buffers only: nothing else of the engine changes.
            custom_load_fn: refused.

        Returns:
            (path, client state); (None, None), with a warning, if there is no checkpoint and no
            tag was given.

        Raises:
            DataError: it is damaged, or there is none of that tag.
            CheckpointMismatchError: it is another model's.
            EngineError: another rank failed. What this one holds may be part old, part new.
        """
        _refuse(custom_load_fn)
        where = str(load_dir)
        first = self._together(lambda: self._on_first(lambda: find_checkpoint(where, tag)))[0]
        if first is None:
            log.warning("there is no checkpoint in %s: nothing was loaded", where)
            return None, None
        choice = Choice(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            progress=not load_module_only,
            options=True,
        )

        def read() -> Any:
            source = open_found(first)
            try:
                self.state.take(source, choice)
                return source.small(0).get("client_state", {})
            finally:
                source.close()

        script = self._together(read)[0]
        self.state.publish()
        self._forget_gradients()
        return first, decode(script)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The whole model in CPU memory on rank 0, an empty dict on the others."""
        found = self.state_dict()
        if not exclude_frozen_parameters:
            return found
        named = self.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, param in named if not param.requires_grad}
        return {name: one for name, one in found.items() if name not in frozen}

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Takes over weights and buffers from a whole state dict, the same one on every rank.

        Raises:
            CheckpointMismatchError: names or shapes differ.
        """
        buffers = {name for name, _ in self.module.named_buffers()}
        pieces = [
            Piece.whole(f"{'buffers' if name in buffers else 'weights'}/{name}", value.cpu())
            for name, value in state_dict.items()
            if isinstance(value, Tensor)
        ]
        source = TensorSource(pieces, {"step": 0}, has_optimizer=False)
        choice = Choice(strict=strict, optimizer=False, scheduler=False, progress=False)
        self._together(lambda: self.state.take(source, choice))
        self.state.publish()

    load_state_dict = load_module_state_dict

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the whole model, in the dtype of its weights, as one file.

        Args:
            save_filename: `*.safetensors` for that format; else what `torch.load` reads.

        Returns:
            True. At every stage: a model whose weights are sharded is gathered unit by unit.
        """
        whole = self.module_state_dict(exclude_frozen_parameters)
        path = Path(save_dir) / save_filename
        self._together(lambda: self._on_first(lambda: write_whole(whole, path)))
        return True

    save_fp16_model = save_16bit_model

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        return together(self._runtime.collectives, self._settings.device, work)

    def _on_first(self, work: Callable[[], Any]) -> Any:
        return None if self._runtime.collectives.rank else work()


def _refuse(custom_load_fn: object) -> None:
    if custom_load_fn is not None:
        raise ConfigError(
            "load_checkpoint(custom_load_fn=...) was given: no rank holds a whole state dict",
            fix="load_module_strict=False, or engine.load_module_state_dict(...)",
        )


def _checked(tag: str) -> str:
    if stays_below(tag):
        return tag
    raise ConfigError(f"the tag {tag!r} is not a folder's name", allowed="such as global_step100")
