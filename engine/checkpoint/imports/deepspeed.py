"""A DeepSpeed ZeRO checkpoint of stages 1 to 3 as a training state: fp32 main weights, optimizer
state, buffers, step, sample cursor, schedule, dynamic loss scale, ties.

Main weights and moments are views of the mapped files. Importing only computes their ranges.
Random-number states are not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from rayzero.engine.checkpoint.imports.deepspeed_files import (
    FlatRange,
    ZeroFiles,
    cut_ranges,
    find_step_folder,
    rank_range,
    read_zero_files,
)
from rayzero.engine.checkpoint.imports.tensors import (
    FlatTensor,
    TensorSource,
    checked_dtype_name,
    flatten,
)
from rayzero.engine.checkpoint.schema import PADDINGS, SHAPES, check_plain, validate
from rayzero.engine.errors import CONTENT_ERRORS, ConfigError, DataError
from rayzero.engine.layout.state_index import TensorRange

ParamShapes = dict[str, tuple[int, ...]]
Layout = list[list[list[TensorRange]]]  # the ranges in each flat tensor of each rank
# Stages 1 and 2 pad a group to a multiple of 2 * ranks, for NCCL; some versions save this padding.
_PADDING_PER_RANK = 2


def open_deepspeed(path: Path) -> TensorSource | None:
    """Opens the state in a checkpoint folder (with `latest`) or a step's folder; returns None for
    other paths. Raises DataError if files are missing or damaged; ConfigError for a kind of
    checkpoint that is not supported."""
    folder = find_step_folder(path)
    if folder is None:
        return None
    try:
        return _make_source(read_zero_files(folder))
    except ConfigError:
        raise
    except CONTENT_ERRORS as error:
        raise DataError(
            f"{folder} does not hold what DeepSpeed is known to write: {error!r:.500}",
            allowed="a checkpoint of DeepSpeed's ZeRO stages 1 to 3, of a version up to 0.19",
        ) from error


def _make_source(files: ZeroFiles) -> TensorSource:
    groups = _param_shapes(files)
    layout = _layout_stage_3(files, groups) if files.stage == 3 else _layout(files, groups)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    pieces = [
        *_partitioned_tensors(files, layout, shapes),
        *_frozen_params(files, shapes),
        *_buffer_tensors(files.models[0]),
    ]
    return TensorSource(pieces, _make_metadata(files, layout))


def _param_shapes(files: ZeroFiles) -> list[ParamShapes]:
    """Returns the shapes of trained parameters by group, in the order of the flat tensors."""
    groups = files.models[0].get("param_shapes")
    if not groups:
        raise DataError(
            f"{files.folder} does not say which parameters it holds: no 'param_shapes'",
            allowed="a checkpoint of DeepSpeed 0.4 or newer",
        )
    return [validate(SHAPES, group) for group in groups]


def _layout(files: ZeroFiles, groups: Sequence[ParamShapes]) -> Layout:
    """Returns the layout of stages 1 and 2."""
    world_size, count = len(files.partitions), len(groups)
    if any(len(partition.flat_tensors) != count for partition in files.partitions):
        raise DataError(f"{files.folder}: ranks do not have the same {count} groups")
    # Padding behind each parameter (`parameter_alignment`).
    paddings = (
        validate(PADDINGS, files.paddings)
        if files.paddings
        else [[0] * len(group) for group in groups]
    )
    if [len(padding) for padding in paddings] != [len(group) for group in groups]:
        raise DataError(f"{files.folder}: the numbers of paddings and parameters differ")
    layout: Layout = [[] for _ in range(world_size)]
    for index, group in enumerate(groups):
        flat_ranges = [
            FlatRange(name, 0, prod(shape), prod(shape) + padding)
            for (name, shape), padding in zip(group.items(), paddings[index], strict=True)
        ]
        lengths = [partition.flat_tensors[index].numel() for partition in files.partitions]
        cuts = cut_ranges(flat_ranges, lengths, slack=_PADDING_PER_RANK * world_size)
        for rank, ranges in enumerate(cuts):
            layout[rank].append(ranges)
    return layout


def _layout_stage_3(files: ZeroFiles, groups: Sequence[ParamShapes]) -> Layout:
    world_size = len(files.partitions)
    numels = [(name, prod(shape)) for group in groups for name, shape in group.items()]
    return [
        cut_ranges(
            [rank_range(name, numel, rank, world_size) for name, numel in numels],
            [flat.numel() for flat in partition.flat_tensors],
        )
        for rank, partition in enumerate(files.partitions)
    ]


def _partitioned_tensors(
    files: ZeroFiles, layout: Layout, shapes: ParamShapes
) -> Iterator[FlatTensor]:
    """Yields main weights and their optimizer state."""
    for partition, cuts in zip(files.partitions, layout, strict=True):
        for flat, state, ranges in zip(partition.flat_tensors, partition.states, cuts, strict=True):
            tensors = {"weights": flat} | {
                f"optimizer.{key}": value
                for key, value in state.items()
                if isinstance(value, Tensor) and value.ndim
            }
            for kind, tensor in tensors.items():
                if tensor.ndim != 1 or tensor.numel() < flat.numel():
                    raise DataError(
                        f"{files.folder}: {kind} of shape {tuple(tensor.shape)} for "
                        f"{flat.numel()} main weights",
                        allowed="optimizer state with one element for each weight",
                    )
                yield FlatTensor(
                    flatten(tensor),
                    [replace(part, name=f"{kind}/{part.name}") for part in ranges],
                    {f"{kind}/{part.name}": shapes[part.name] for part in ranges},
                )


def _frozen_params(files: ZeroFiles, trained: ParamShapes) -> Iterator[FlatTensor]:
    """Yields the parameters that the optimizer does not have, in the model's dtype."""
    first = files.models[0]
    if files.stage != 3:
        not_frozen = {*trained, *(first.get("shared_params") or {}), *first["buffer_names"]}
        for name, value in first["module"].items():
            if name not in not_frozen and isinstance(value, Tensor):
                yield FlatTensor.from_tensor(f"weights/{name}", value)
        return
    for name, shape in validate(SHAPES, first.get("frozen_param_shapes") or {}).items():
        full, numel = f"weights/{name}", prod(shape)
        for rank, model in enumerate(files.models):
            fragment = flatten(model["frozen_param_fragments"][name])
            flat_range = rank_range(full, numel, rank, len(files.models))
            (ranges,) = cut_ranges([flat_range], [fragment.numel()])
            yield FlatTensor(fragment, ranges, {full: shape})


def _buffer_tensors(model: dict[str, Any]) -> Iterator[FlatTensor]:
    for name in model["buffer_names"]:
        value = model["module"].get(name)
        if isinstance(value, Tensor):
            yield FlatTensor.from_tensor(f"buffers/{name}", value)


# DeepSpeed's own entries of a model file. All other entries are the script's `client_state`.
_OWN_ENTRIES = frozenset(
    (
        "buffer_names checkpoint_parallel_dimensions csr_tensor_module_names data_sampler "
        "dp_world_size ds_config ds_version frozen_param_fragments frozen_param_shapes "
        "global_samples global_steps lr_scheduler module mp_world_size num_experts optimizer "
        "param_shapes random_ltd shared_params skipped_steps sparse_tensor_module_names"
    ).split()
)


def _make_metadata(files: ZeroFiles, layout: Layout) -> dict[str, Any]:
    """Returns the JSON part of the state."""
    model = files.models[0]
    ties, scheduler = dict(model.get("shared_params") or {}), model.get("lr_scheduler") or {}
    not_stored = {*model["buffer_names"], *ties}  # as weights of their own
    return {
        "step": int(model["global_steps"]),
        "sample_cursor": int(model.get("global_samples") or 0),
        "groups": _optimizer_groups(files, layout),
        # DeepSpeed and rayzero use the same keys for a schedule's state.
        "scheduler": _plain_values(scheduler) or None,
        "loss_scale": _loss_scale_state(files.loss_scaler),
        "client_state": _plain_values(
            {key: value for key, value in model.items() if key not in _OWN_ENTRIES}
        ),
        "ties": ties,
        "model_dtypes": {
            name: checked_dtype_name(value.dtype, name)
            for name, value in model["module"].items()
            if isinstance(value, Tensor) and name not in not_stored
        },
    }


def _optimizer_groups(files: ZeroFiles, layout: Layout) -> list[dict[str, Any]]:
    """Returns each optimizer group's options, scalars of its state, and names of parameters."""
    first, groups = files.partitions[0], []
    for given in first.options:
        flats, options = given["params"], _plain_values(given)
        state = first.states[flats[0]] if flats else {}
        scalars = {key: _scalar_to_json(value) for key, value in state.items() if _is_number(value)}
        if "step" in options:  # fused optimizers keep the step in the group
            scalars.setdefault("step", _scalar_to_json(options.pop("step")))
        ranges = (part for cuts in layout for flat in flats for part in cuts[flat])
        names = list(dict.fromkeys(part.name for part in ranges))
        groups.append({"options": options, "scalars": scalars, "params": names})
    return groups


def _plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that JSON can represent, without `params`, which are saved by name."""
    plain = {key: _to_python(value) for key, value in values.items() if key != "params"}
    for key in list(plain):
        with suppress(ValueError):
            check_plain([plain[key]])
            continue
        del plain[key]
    return plain


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def _scalar_to_json(value: Any) -> dict[str, Any]:
    """Encodes a number of optimizer state as a tensor, fp32 by default, as torch keeps it."""
    dtype = checked_dtype_name(value.dtype, "a number") if isinstance(value, Tensor) else "F32"
    return {"dtype": dtype, "value": _to_python(value)}


def _to_python(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def _loss_scale_state(scaler: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a dynamic loss scale's state as `rayzero.engine.precision.loss_scale` saves it; None
    for a static scale."""
    if "cur_hysteresis" not in scaler:
        return None
    return {
        "value": float(scaler["cur_scale"]),
        "hysteresis": int(scaler["cur_hysteresis"]),
        "good_steps": int(scaler["cur_iter"]) - int(scaler["last_overflow_iter"]) - 1,
    }
