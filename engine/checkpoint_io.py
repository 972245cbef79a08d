"""Saves and loads an engine's checkpoints, in rayzero's format (docs/checkpoints.md)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from torch import Tensor, nn

from rayzero.engine.checkpoint.catalogue import newest_complete
from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import MANIFEST_NAME, is_safe_name
from rayzero.engine.checkpoint.imports import open_foreign
from rayzero.engine.checkpoint.imports.tensors import FlatTensor, TensorSource
from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.engine.checkpoint.store import join_url, open_store
from rayzero.engine.comm.collectives import run_on_all_ranks
from rayzero.engine.data.sampling import TrainingProgress
from rayzero.engine.errors import ConfigError, DataError
from rayzero.engine.layout.engine_parts import choose_part
from rayzero.engine.layout.packed import plain_tensors
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.state.client_state import decode_client_state, encode_client_state
from rayzero.engine.state.load import LoadOptions
from rayzero.engine.state.metadata import damaged_unless_valid
from rayzero.engine.state.save import LATEST_FILE, save_state
from rayzero.engine.training_step import TrainingStep

log = logging.getLogger("rayzero.engine")


def save_checkpoint(
    step: TrainingStep,
    folder: str,
    tag: str,
    *,
    client_state: dict[str, Any],
    latest: bool,
    include_frozen: bool,
) -> bool:
    """See `Engine.save`."""
    collectives = step.runtime.collectives
    if is_late(step.state.progress, f"checkpoint {tag}", collectives.rank):
        return False
    answers = run_on_all_ranks(
        collectives, lambda: [check_tag(tag), encode_client_state(client_state)]
    )
    tags = sorted({given for given, _ in answers})
    validation = step.settings.config.checkpoint.tag_validation
    if len(tags) > 1 and validation == "Fail":
        raise ConfigError(
            f"save_checkpoint got different tags: {tags}",
            allowed="the same tag on every rank",
            fix="checkpoint.tag_validation: Warn, which uses rank 0's",
        )
    tag = answers[0][0]
    if len(tags) > 1 and validation == "Warn" and collectives.rank == 0:
        log.warning("save_checkpoint got different tags: %s; rank 0's, %r, is used", tags, tag)
    target = folder, tag
    save_state(step.state, collectives, target, answers[0][1], latest=latest, frozen=include_frozen)
    return True


def is_late(progress: TrainingProgress, what: str, rank: int) -> bool:
    """Returns whether a script that was run again is at the end of an epoch that the job finished
    before. What the script saves there was written then, and the engine is at a later step already.
    Rank 0 logs that `what` is not written."""
    if not progress.script_lag:
        return False
    if rank == 0:
        text = "%s, of an epoch that is finished, is not written again: the engine is at step %d"
        log.warning(text, what, progress.step)
    return True


def load_checkpoint(
    step: TrainingStep, folder: str, tag: str | None, options: LoadOptions
) -> tuple[str | None, dict[str, Any] | None]:
    """See `Engine.load`."""
    collectives = step.runtime.collectives
    step.state.progress.ask_place()

    def resolve() -> str | None:
        return None if collectives.rank else resolve_checkpoint(folder, tag)

    path = run_on_all_ranks(collectives, resolve)[0]
    if path is None:
        log.warning("there is no checkpoint in %s: nothing was loaded", folder)
        return None, None

    def read() -> Any:
        with closing(open_checkpoint(path)) as opened:
            source = choose_part(opened, step.state.engine_name)
            encoded = source.metadata(0).get("client_state", {})
            keys = list(encoded)
            loads = not options.progress or step.meter.admits_load(source.step, keys)
            if loads:
                step.state.load_from(source, options)
            return loads, source.step, encoded

    loads, saved_step, encoded = run_on_all_ranks(collectives, read)[0]
    if loads:
        step.state.sync_model_weights()
        step.discard_gradients()
        if options.progress:
            step.micro_batches.forget()
            step.tracker.uncounted_micro_steps = 0
            step.meter.on_state_loaded(tells_place=bool(encoded))
            step.state.progress.restore_rng = None  # the caller may seed before it trains
    elif collectives.rank == 0:
        text = "the checkpoint of step %d is not loaded: the job continues with %d finished steps"
        log.warning(text, saved_step, step.state.progress.step)
    with damaged_unless_valid("client_state"):
        return path, decode_client_state(encoded)


def check_tag(tag: str) -> str:
    """Returns the tag. Raises ConfigError if the tag is not safe as a folder's name."""
    if is_safe_name(tag):
        return tag
    raise ConfigError(
        f"the tag {tag!r} is not a folder's name", allowed="a folder's name, such as global_step100"
    )


def resolve_checkpoint(folder: str, tag: str | int | None) -> str | None:
    """Returns the path or URL of the checkpoint `tag`; without a tag, of the one that the file
    `latest` names, or else of the newest complete one. Returns None if no tag was given and the
    folder has no checkpoint. Raises DataError if there is none of that tag, or of that in `latest`.
    """
    name = _read_latest_tag(folder) if tag is None else str(tag)
    if name is None:
        newest = newest_complete(folder)
        return newest.folder if newest is not None else None
    path = join_url(folder, name)
    if not is_safe_name(name) or not open_store(path).list_folder():
        raise DataError(
            f"there is no checkpoint {name!r} in {folder}",
            allowed="a tag that was saved there",
            fix="load_checkpoint(tag=...)"
            if tag is not None
            else f"edit the file {LATEST_FILE} there",
        )
    return path


def open_checkpoint(path: str) -> StateSource:
    """Opens a checkpoint in rayzero's or DeepSpeed's format. Raises DataError if `path` is neither,
    or is damaged."""
    if any(entry.name == MANIFEST_NAME for entry in open_store(path).list_folder()):
        return CheckpointSource(path)
    foreign = open_foreign(path)
    if foreign is None:
        raise DataError(
            f"{path} is no checkpoint: it has neither a {MANIFEST_NAME} nor DeepSpeed's files",
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


def without_frozen(
    model: nn.Module, state: dict[str, Tensor], exclude_frozen: bool
) -> dict[str, Tensor]:
    """Returns `state`, a model's state dict; with `exclude_frozen`, without frozen parameters."""
    if not exclude_frozen:
        return state
    named = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, param in named if not param.requires_grad}
    return {name: value for name, value in state.items() if name not in frozen}


def load_model_state(
    step: TrainingStep, model: nn.Module, values: Mapping[str, Any], strict: bool
) -> None:
    """Loads weights and buffers from a full state dict, equal on every rank. Collective."""
    buffers = {name for name, _ in model.named_buffers()}
    tensors = [
        FlatTensor.from_tensor(f"{'buffers' if name in buffers else 'weights'}/{path}", part.cpu())
        for name, value in values.items()
        if isinstance(value, Tensor)
        for path, part in plain_tensors(name, value).items()
    ]
    source = TensorSource(tensors, {"step": 0})
    options = LoadOptions(strict=strict, optimizer=False, scheduler=False, progress=False)
    run_on_all_ranks(step.runtime.collectives, lambda: step.state.load_from(source, options))
    step.state.sync_model_weights()
