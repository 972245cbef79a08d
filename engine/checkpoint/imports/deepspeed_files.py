"""Files of a DeepSpeed ZeRO checkpoint, and the layout of parameters in its flat partitions.

Stages 1 and 2: a group's parameters are concatenated in one flat tensor, which is cut into one
partition for each rank. Stage 3: every parameter is cut into equal parts, the last one padded, and
a rank's parts of all parameters are concatenated. In both cases a sequence of ranges fills a
sequence of flat tensors, whose boundaries may differ from those of the ranges.

The files are loaded with torch's weights-only loader: data, never code. DeepSpeed saves a few
objects of its own classes next to the tensors (a loss scaler, an enum, fragment addresses). They
are loaded as `InertObject` or a number: DeepSpeed is not needed, and none of its code runs. A file
with objects of any other class is rejected, and the error names the class.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from rayzero.engine.checkpoint.errors import store_errors
from rayzero.engine.checkpoint.format import is_safe_name
from rayzero.engine.checkpoint.imports.tensors import flatten
from rayzero.engine.checkpoint.store_local import LocalReadStream, LocalStore
from rayzero.engine.errors import CONTENT_ERRORS, ConfigError, DataError, first_line
from rayzero.engine.layout.state_index import TensorRange
from rayzero.engine.validation import repr_value

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_SUPPORTED = "a checkpoint of DeepSpeed's ZeRO stages 1 to 3, data parallel only"
# Keys in rank 0's model file that show other kinds of parallelism than data parallelism.
_PARALLELISM_KEYS = ("mp_world_size", "ds_autoep_layers", "autoep_layers")


_STAGE_ENUM = "deepspeed.runtime.zero.config.ZeroStageEnum"
# Errors of the zip reader and the weights-only unpickler for truncated or foreign files.
_READ_ERRORS = (OSError, EOFError, BadZipFile, pickle.UnpicklingError, struct.error)


class InertObject:
    """Placeholder of an object whose class is not loaded. `fields` is the object's state if that
    state is a dictionary."""

    def __init__(self, *_: Any) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {}


def load_weights_only(path: Path) -> dict[str, Any]:
    """Loads the dictionary in a file of `torch.save`; tensors are views of the mapped file.

    Raises:
        DataError: the file is damaged or of another format, or a tensor is larger than its storage.
        StoreError: the file cannot be opened, or is not a regular file.
        ConfigError: the file has objects of classes other than DeepSpeed's.
    """
    with store_errors(str(path)), closing(LocalReadStream(path)) as file:
        nbytes = file.nbytes
    try:
        with ZipFile(path) as archive:  # torch.save does not compress
            if sum(entry.file_size for entry in archive.infolist()) > nbytes:
                raise BadZipFile("it expands to more bytes than it has")
        names = get_unsafe_globals_in_checkpoint(str(path))
        unsupported = sorted(name for name in names if not name.startswith("deepspeed."))
        if unsupported:
            listed = ", ".join(unsupported[:5])
            raise ConfigError(
                f"{path} holds objects of {listed:.300}, which would run code to load",
                allowed="tensors, numbers, text, and lists and dictionaries of them",
                fix="save what is stored with the model (client_state) as plain values",
            )
        stubs: list[Any] = [(int if name == _STAGE_ENUM else InertObject, name) for name in names]
        with safe_globals(stubs):
            content = torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not a dictionary")
        _check_content(content, nbytes)
    except ConfigError:
        raise
    except (*_READ_ERRORS, *CONTENT_ERRORS) as error:
        raise DataError(
            f"{path} cannot be read: {first_line(error):.500}", allowed="a file of torch.save"
        ) from error
    return content


def _check_content(content: Any, nbytes: int) -> None:
    """Raises ValueError for a tensor that is not plain or larger than its storage or than the file,
    an integer of over 64 bits, or text that is not Unicode."""
    stack, seen = [content], set[int]()
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            _check_tensor(value, nbytes)
        elif isinstance(value, str):
            value.encode()
        elif isinstance(value, int) and abs(value) >> 63:
            raise ValueError("it holds an integer of over 64 bits")
        elif isinstance(value, InertObject):
            stack.append(value.fields)
        elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            stack += [*value, *value.values()] if isinstance(value, dict) else value


def _check_tensor(tensor: Tensor, nbytes: int) -> None:
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.is_quantized or tensor.is_nested or tensor.is_neg():
        raise ValueError(f"it holds a tensor of {tensor.layout} on {tensor.device}")
    held = min(nbytes, tensor.untyped_storage().nbytes())
    if tensor.nbytes > held:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} in a storage of {held} bytes")


@dataclass(frozen=True)
class RankPartition:
    """One rank's share of main weights and optimizer state.

    Attributes:
        flat_tensors: fp32 main weights, 1-D; one tensor for each parameter group (stages 1 and 2)
            or sub-group (stage 3).
        states: each flat tensor's optimizer state: numbers, and tensors at least as long as the
            flat tensor.
        options: the optimizer's parameter groups; `params` are indices into `flat_tensors`.
    """

    flat_tensors: Sequence[Tensor]
    states: Sequence[dict[str, Any]]
    options: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ZeroFiles:
    """The content of a checkpoint's files, as `read_zero_files` returns it.

    Attributes:
        models: content of the model files, of every rank at stage 3, else only of rank 0.
        paddings: elements of padding behind each parameter of each group; None if there is none.
        loss_scaler: fields of DeepSpeed's loss scaler; empty if there was none.
    """

    folder: Path
    stage: int
    models: Sequence[dict[str, Any]]
    partitions: Sequence[RankPartition]
    paddings: Sequence[Sequence[int]] | None
    loss_scaler: dict[str, Any]


def find_step_folder(path: Path) -> Path | None:
    """Returns the folder with DeepSpeed's files: `path`, or the folder that `path/latest` names;
    None if there are no such files. Raises DataError if `latest` names a folder that does not exist
    or holds no such files; StoreError if a folder or `latest` cannot be read."""
    if not path.is_dir():
        return None
    if _has_files(path):
        return path
    latest = path / "latest"
    if not latest.is_file():
        return None
    tag = LocalStore(path).read(latest.name).decode(errors="replace").strip()
    folder = path / tag
    if not is_safe_name(tag) or not folder.is_dir():
        raise DataError(
            f"{latest} names {repr_value(tag)}, which is not a folder in {path}",
            fix="give the path of a step's folder itself",
        )
    if not _has_files(folder):
        raise DataError(f"{folder} holds no *_model_states.pt", allowed=_SUPPORTED)
    return folder


def read_zero_files(folder: Path) -> ZeroFiles:
    """Maps all files and checks that they belong together. Raises DataError if files or keys are
    missing or damaged; ConfigError for a kind of checkpoint that is not supported."""
    states = {
        rank: _require_key(load_weights_only(path), "optimizer_state_dict", path)
        for rank, path in _files_by_rank(folder, _OPTIMIZER_FILE).items()
    }
    if not states:
        raise ConfigError(
            f"{folder} holds no *_optim_states.pt: it was saved without ZeRO", allowed=_SUPPORTED
        )
    first = states[min(states)]
    world_size = _saved_world_size(first, folder)
    _check_ranks(folder, states, world_size, "*_optim_states.pt")
    models = {
        rank: load_weights_only(path) for rank, path in _files_by_rank(folder, _MODEL_FILE).items()
    }
    # DeepSpeed's bf16 optimizer saves no stage; its state has the layout of stage 1.
    stage = int(first.get("zero_stage", 1))
    if stage not in (1, 2, 3):
        raise ConfigError(f"{folder} is of stage {stage}", allowed=_SUPPORTED)
    _check_ranks(folder, models, world_size if stage == 3 else 1, "*_model_states.pt")
    _check_data_parallel_only(models[0], folder)
    partitions = [_read_partition(states[rank], stage, folder) for rank in range(world_size)]
    ordered = [models[rank] for rank in sorted(models)]
    paddings, scaler = first.get("param_alignment_paddings"), first.get("loss_scaler")
    fields = scaler.fields if isinstance(scaler, InertObject) else {}
    return ZeroFiles(folder, stage, ordered, partitions, paddings, fields)


def _matching_files(folder: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    with store_errors(str(folder)):
        paths = sorted(folder.iterdir())
    return [(path, match) for path in paths if (match := pattern.fullmatch(path.name))]


def _has_files(folder: Path) -> bool:
    return bool(_matching_files(folder, _MODEL_FILE) or _matching_files(folder, _OPTIMIZER_FILE))


def _files_by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    paths: dict[int, Path] = {}
    for path, match in _matching_files(folder, pattern):
        rank, model_rank = (int(part or 0) for part in match.groups())
        if model_rank:
            raise ConfigError(f"{path} is of a model-parallel run", allowed=_SUPPORTED)
        if rank in paths:
            raise DataError(
                f"{paths[rank].name} and {path.name} in {folder} are both of rank {rank}",
                fix="remove the one that an older save left behind",
            )
        paths[rank] = path
    return paths


def _check_ranks(folder: Path, files: dict[int, Any], world_size: int, kind: str) -> None:
    if missing := [rank for rank in range(min(world_size, len(files) + 5)) if rank not in files]:
        raise DataError(
            f"{folder} lacks the {kind} of ranks {missing[:5]}, of {world_size} that wrote it",
            allowed="the files of all ranks: copy them from every node",
        )
    if extra := sorted(rank for rank in files if rank >= world_size):
        raise DataError(
            f"{folder} holds {kind} of ranks {extra}, but {world_size} ranks wrote it",
            fix="remove those that an older save left behind",
        )


def _require_key(content: dict[str, Any], key: str, place: Path) -> Any:
    if content.get(key) is None:
        raise DataError(f"{place} has no {key!r}", allowed=_SUPPORTED)
    return content[key]


def _saved_world_size(state: dict[str, Any], folder: Path) -> int:
    count = _require_key(state, "partition_count", folder)
    counts = set(count) if isinstance(count, list) else {count}  # one for each group
    if len(counts) != 1:
        raise ConfigError(
            f"{folder}: groups are cut over {sorted(counts)[:5]} ranks (mixture of experts)",
            allowed=_SUPPORTED,
        )
    return int(counts.pop())


def _check_data_parallel_only(model: dict[str, Any], folder: Path) -> None:
    if not isinstance(model.get("module"), dict):
        raise ConfigError(f"{folder} is of a pipeline-parallel run", allowed=_SUPPORTED)
    seen = [key for key in _PARALLELISM_KEYS if model.get(key) not in (None, 1, [])]
    seen += [path.name for path in sorted(folder.glob("*expert_*"))]
    if seen:
        raise ConfigError(
            f"{folder} is of a model-parallel or expert-parallel run: it has {', '.join(seen)}",
            allowed=_SUPPORTED,
        )


def _read_partition(state: dict[str, Any], stage: int, folder: Path) -> RankPartition:
    keys = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if stage == 3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    flats, inner = (_require_key(state, key, folder) for key in keys)
    if isinstance(inner, list):  # elastic_checkpoint: one state for each group, no options
        options: list[dict[str, Any]] = [{"params": [index]} for index in range(len(inner))]
        states = inner
    else:
        options, states = [], []
        for group in _require_key(inner, "param_groups", folder):
            # torch numbers parameters group by group, which is the order of the flat tensors
            first = len(states)
            states += [inner["state"].get(index, {}) for index in group["params"]]
            options.append({**group, "params": list(range(first, len(states)))})
    if len(states) != len(flats):
        raise DataError(
            f"{folder}: optimizer state of {len(states)} tensors for {len(flats)} of main weights",
            allowed=_SUPPORTED,
        )
    return RankPartition([flatten(flat) for flat in flats], states, options)


@dataclass(frozen=True)
class FlatRange:
    """Elements `start` to `stop` of a parameter, and padding up to `length` elements."""

    name: str
    start: int
    stop: int
    length: int


def rank_range(name: str, numel: int, rank: int, world_size: int) -> FlatRange:
    """Returns a rank's part of a parameter at stage 3."""
    length = -(-numel // world_size)
    start, stop = (min(edge * length, numel) for edge in (rank, rank + 1))
    return FlatRange(name, start, stop, length)


def cut_ranges(
    flat_ranges: Sequence[FlatRange], lengths: Sequence[int], slack: int = 0
) -> list[list[TensorRange]]:
    """Returns the parameter ranges in each flat tensor; offsets count elements. Raises DataError if
    the sizes do not add up, which shows another layout than the one assumed here.

    Args:
        lengths: elements of each flat tensor, in order.
        slack: maximum number of unused elements at the end.
    """
    needed, held = sum(part.length for part in flat_ranges), sum(lengths)
    if not needed <= held <= needed + slack:
        raise DataError(
            f"the partitions hold {held} elements, the parameters need {needed}",
            allowed="a checkpoint that all of its ranks wrote, of a DeepSpeed version up to 0.19",
        )
    ranges: list[list[TensorRange]] = [[] for _ in lengths]
    ends = list(accumulate(lengths))
    flat = position = 0
    for part in flat_ranges:
        done = 0
        while done < part.length:
            count = min(part.length - done, ends[flat] - position)
            start, stop = (min(part.start + edge, part.stop) for edge in (done, done + count))
            if start < stop:
                offset = position - (ends[flat] - lengths[flat])
                ranges[flat].append(TensorRange(part.name, start, stop, offset))
            done, position = done + count, position + count
            if position == ends[flat]:
                flat += 1
    return ranges
