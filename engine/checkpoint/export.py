"""Exports checkpoints to files of other systems.

| kind | written | read by |
|---|---|---|
| `safetensors` | `model.safetensors`; above 5 GB files with an index | transformers, safetensors |
| `torch` | `pytorch_model.pt`, a state dict | `torch.load(weights_only=True)`, strict loading |
| `dcp` | a `torch.distributed.checkpoint` folder: `model`, `optimizer` | `dcp.load` |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import rmtree
from warnings import catch_warnings, filterwarnings

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from rayzero.engine.checkpoint.export_model import ExportedModel, save_safetensors
from rayzero.engine.checkpoint.imports import open_foreign
from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.engine.errors import ConfigError, DataError, did_you_mean
from rayzero.engine.layout.engine_parts import choose_part
from rayzero.engine.layout.state_index import StateSource

SHARD_BYTES = 5_000_000_000


def export_checkpoint(
    folder: str,
    target: str,
    kind: str,
    progress: Callable[[int], None] = lambda _: None,
    engine: str | None = None,
) -> list[str]:
    """Exports a checkpoint; returns the paths of the files written. Raises ConfigError if an
    argument is wrong or the target is not empty; DataError if the checkpoint is damaged or the
    target cannot be written.

    Args:
        folder: a checkpoint's folder (one step), or a path that `open_foreign` supports.
        target: a local folder, new or empty; it appears once all files are written.
        kind: `safetensors`, `torch` or `dcp`.
        progress: called with the bytes of each read.
        engine: name of the engine, if the checkpoint has several; None for the first one.
    """
    with closing(open_foreign(folder) or CheckpointSource(folder)) as source:
        if isinstance(source, CheckpointSource):
            source.check_sizes()  # before memory is allocated for what the manifest states
        return export_state(choose_part(source, engine), target, kind, progress)


def export_state(
    source: StateSource, target: str, kind: str, progress: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Exports and raises as `export_checkpoint`, from an open source."""
    if kind not in _WRITERS:
        raise ConfigError(
            f"cannot export as {kind!r}{did_you_mean(kind, list(_WRITERS))}",
            allowed=", ".join(_WRITERS),
        )
    state = ExportedModel(source, progress)
    with _atomic_folder(Path(target)) as folder:
        _WRITERS[kind](state, folder)
    return sorted(str(path) for path in Path(target).rglob("*") if path.is_file())


def write_safetensors(state: ExportedModel, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes one tensor for each parameter and buffer. One file's tensors are in memory at once."""
    shards = _split_into_files(state.sizes(), shard_bytes)
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        save_safetensors(
            {name: state.read(name) for name in names}, folder / file, {"format": "pt"}
        )
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(state.sizes().values())},
            "weight_map": dict(sorted(places.items())),
        }
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _split_into_files(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Returns the tensor names of each file. A file has at most `limit` bytes, or one tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_torch(state: ExportedModel, folder: Path) -> None:
    content = _full_state_dict(state)
    try:
        torch.save(content, folder / "pytorch_model.pt")
    except RuntimeError as error:  # the zip writer reports only a short write
        raise OSError("torch.save could not write the whole file; the disk may be full") from error


def _write_dcp(state: ExportedModel, folder: Path) -> None:
    content = {"model": _full_state_dict(state)} | state.optimizer()
    try:
        with catch_warnings():
            # It is disabled on purpose: `no_dist`.
            filterwarnings("ignore", message="torch.distributed is disabled")
            save_distributed(content, storage_writer=FileSystemWriter(folder), no_dist=True)
    except CheckpointException as error:
        reasons = "; ".join(str(failure) for failure, _ in error.failures.values())
        raise OSError(f"torch.distributed.checkpoint: {reasons}") from error


def _full_state_dict(state: ExportedModel) -> dict[str, Tensor]:
    """Returns the model's state dict: tied parameters under all of their names, and buffers."""
    tensors = {name: state.read(name) for name in state.sizes()}
    return tensors | {alias: tensors[name] for alias, name in state.ties.items()}


_WRITERS: dict[str, Callable[[ExportedModel, Path], None]] = {
    "safetensors": write_safetensors,
    "torch": _write_torch,
    "dcp": _write_dcp,
}


@contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder, which is renamed to `target` on success and removed on failure."""
    partial = target.parent / f".{target.name}.partial"
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(
                f"{target} already exists", allowed="a new or an empty folder to export to"
            )
        rmtree(partial, ignore_errors=True)  # left by an export that was killed
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot write {target}: {error}",
            fix="check the target folder, its permissions, its free space",
        ) from error
    finally:
        rmtree(partial, ignore_errors=True)
