"""EngineCheckpointing: save_/load_checkpoint, tag lookup.

An engine's checkpoints, by DeepSpeed's names, in rayzero's format (docs/checkpoints.md).

Which checkpoint a script means by a folder and a tag.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rayzero.engine.checkpoint.catalogue import newest_complete
from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.export_model import write_model_file
from rayzero.engine.checkpoint.format import MANIFEST_NAME, is_safe_name
from rayzero.engine.checkpoint.imports import open_foreign
from rayzero.engine.checkpoint.imports.tensors import FlatTensor, TensorSource
from rayzero.engine.checkpoint.open_store import open_store
from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.engine.checkpoint.store import join_url
from rayzero.engine.comm.collectives import run_on_all_ranks
from rayzero.engine.errors import ConfigError, DataError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.settings import Settings
from rayzero.engine.state.client_state import decode_client_state, encode_client_state
from rayzero.engine.state.load import LoadOptions
from rayzero.engine.state.save import LATEST_FILE, RankSaver
from rayzero.engine.state.training import TrainingState
from rayzero.engine.zero.runtime import ZeroRuntime


def resolve_checkpoint(folder: str, tag: str | int | None) -> str | None:
    """The path or URL of one checkpoint; None if no tag was given, and there is none.

    Raises:
        DataError: there is none of that tag, or of the one that `latest` names.
        StoreError: the store cannot be read.
    """
    name = _read_latest_tag(folder) if tag is None else str(tag)
    if name is None:
        newest = newest_complete(folder)
        return newest.folder if newest is not None else None
    found = join_url(folder, name)
    if not is_safe_name(name) or not open_store(found).list_folder():
        raise DataError(
            f"there is no checkpoint {name!r} in {folder}",
            allowed="a tag that was saved there",
            fix="load_checkpoint(tag=...)" if tag is not None else f"the file {LATEST_FILE} there",
        )
    return found


def open_checkpoint(place: str) -> StateSource:
    """The state in it, ours or DeepSpeed's.

    Raises:
        DataError: neither, or damaged.
    """
    if any(entry.name == MANIFEST_NAME for entry in open_store(place).list_folder()):
        return CheckpointSource(place)
    foreign = open_foreign(place)
    if foreign is None:
        raise DataError(
            f"{place} is no checkpoint: it has neither a {MANIFEST_NAME} nor DeepSpeed's files",
            fix="load_checkpoint(load_dir, tag)",
        )
    return foreign


def _read_latest_tag(folder: str) -> str | None:
    try:
        return open_store(folder).read(LATEST_FILE).decode(errors="replace").strip() or None
    except StoreError as error:
        if error.kind != "gone":
            raise
        return None


log = logging.getLogger("rayzero.engine")


class EngineCheckpointing:
    """The part of `Engine` that saves and loads. Every method is collective."""

    module: nn.Module
    state: TrainingState
    _runtime: ZeroRuntime
    _settings: Settings

    def state_dict(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def _discard_gradients(self) -> None:
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
        answers = self._on_all_ranks(lambda: [_checked_tag(name), encode_client_state(script)])
        if len({one for one, _ in answers}) > 1:
            raise ConfigError(
                f"save_checkpoint got different tags: {sorted({one for one, _ in answers})}",
                allowed="the same tag on every rank",
            )
        saver = RankSaver(
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
        _refuse_custom_load_fn(custom_load_fn)
        where = str(load_dir)
        first = self._on_all_ranks(
            lambda: self._on_rank_zero(lambda: resolve_checkpoint(where, tag))
        )[0]
        if first is None:
            log.warning("there is no checkpoint in %s: nothing was loaded", where)
            return None, None
        choice = LoadOptions(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            progress=not load_module_only,
            optimizer_options=True,
        )

        def read() -> Any:
            source = open_checkpoint(first)
            try:
                self.state.load_from(source, choice)
                return source.metadata(0).get("client_state", {})
            finally:
                source.close()

        script = self._on_all_ranks(read)[0]
        self.state.sync_model_weights()
        self._discard_gradients()
        return first, decode_client_state(script)

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
            FlatTensor.from_tensor(
                f"{'buffers' if name in buffers else 'weights'}/{name}", value.cpu()
            )
            for name, value in state_dict.items()
            if isinstance(value, Tensor)
        ]
        source = TensorSource(pieces, {"step": 0}, has_optimizer=False)
        choice = LoadOptions(strict=strict, optimizer=False, scheduler=False, progress=False)
        self._on_all_ranks(lambda: self.state.load_from(source, choice))
        self.state.sync_model_weights()

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
        self._on_all_ranks(lambda: self._on_rank_zero(lambda: write_model_file(whole, path)))
        return True

    save_fp16_model = save_16bit_model

    def _on_all_ranks(self, work: Callable[[], Any]) -> list[Any]:
        return run_on_all_ranks(self._runtime.collectives, self._settings.device, work)

    def _on_rank_zero(self, work: Callable[[], Any]) -> Any:
        return None if self._runtime.collectives.rank else work()


def _refuse_custom_load_fn(custom_load_fn: object) -> None:
    if custom_load_fn is not None:
        raise ConfigError(
            "load_checkpoint(custom_load_fn=...) was given: no rank holds a whole state dict",
            fix="load_module_strict=False, or engine.load_module_state_dict(...)",
        )


def _checked_tag(tag: str) -> str:
    if is_safe_name(tag):
        return tag
    raise ConfigError(f"the tag {tag!r} is not a folder's name", allowed="such as global_step100")
