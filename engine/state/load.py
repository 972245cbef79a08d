"""Brings the ranges that a rank needs from a state source into its tensors."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rayzero.engine.checkpoint.check import check_fits
from rayzero.engine.checkpoint.imports.naming import use_model_names
from rayzero.engine.checkpoint.imports.tensors import TensorSource
from rayzero.engine.layout.reshard import Copy, plan_copies
from rayzero.engine.optim.local import LocalOptimizer, Run
from rayzero.engine.state.parts import (
    DTYPES,
    Part,
    all_parts,
    dtype_name,
    kept_buffers,
    optimizer_part,
)
from rayzero.engine.state.residuals import load_residuals
from rayzero.engine.state.source import StateSource
from rayzero.engine.state.table import LogicalTensor, Range
from rayzero.engine.zero.runtime import ZeroRuntime

log = logging.getLogger("rayzero.engine")


@dataclass(frozen=True)
class Choice:
    """How much of a state is taken over.

    Attributes:
        strict: every weight of the model must be in the state, and every one of the state in the
            model; else those in both are taken.
        optimizer: the optimizer's state and options. Without, they stay as they are.
        scheduler: the schedule's place.
        progress: step, sample cursor, random states.
        options: the optimizer's options, such as its learning rate, also where no schedule sets
            them; they are this run's config's otherwise.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    progress: bool = True
    options: bool = False


ALL = Choice()


@torch.no_grad()
def load_tensors(
    model: nn.Module,
    runtime: ZeroRuntime,
    optimizer: LocalOptimizer,
    source: StateSource,
    choice: Choice = ALL,
) -> None:
    """Fills this rank's weights, buffers and optimizer state. No collectives.

    A buffer that the source does not have keeps its value, as do frozen parameters that were left
    out on purpose; an optimizer begins anew when the source has weights only.

    Raises:
        CheckpointMismatchError: the source is of another model.
        MissingRangesError: the source is incomplete.
        DataError: the source is damaged.
    """
    if isinstance(source, TensorSource):  # another system's file
        use_model_names(source, model)
    held = {name: one for table in source.tables for name, one in table.tensors.items()}
    wanted = _of_model(model, runtime)
    absent = _absent(model, wanted, held, source, choice)
    check_fits(
        {name: one for name, one in wanted.items() if name not in absent},
        {
            name: one
            for name, one in held.items()
            if name.startswith(("weights/", "buffers/")) and (choice.strict or name in wanted)
        },
    )
    if choice.optimizer:
        optimizer.begin_anew()
    parts = [
        _without(part, absent)
        for part in all_parts(model, runtime, optimizer)
        if choice.optimizer or not part.is_optimizer
    ]
    for run in optimizer.runs if choice.optimizer else ():
        parts += _optimizer_state(optimizer, run, held)
    _fill(parts, source)
    load_residuals(runtime, held, source.small(0), lambda parts: _fill(parts, source))


def _fill(parts: Sequence[Part], source: StateSource) -> None:
    of = {one: part for part in parts for one in part.ranges}
    copies = plan_copies(of, [table.ranges for table in source.tables])
    _carry_out(copies, of, source)


def _absent(
    model: nn.Module,
    wanted: Mapping[str, LogicalTensor],
    held: Mapping[str, LogicalTensor],
    source: StateSource,
    choice: Choice,
) -> set[str]:
    """What the model has, the source has not, and may do without."""
    frozen = set[str]()
    if source.small(0).get("frozen") is False:
        names = model.named_parameters(remove_duplicate=False)
        frozen = {f"weights/{name}" for name, param in names if not param.requires_grad}
    absent = {
        name
        for name in wanted
        if name not in held and (not choice.strict or name.startswith("buffers/") or name in frozen)
    }
    if absent:
        log.warning(
            "%d tensors of the model are not in the state that is loaded, and stay", len(absent)
        )
    return absent


def _without(part: Part, absent: set[str]) -> Part:
    return replace(part, ranges=tuple(one for one in part.ranges if one.name not in absent))


def _of_model(model: nn.Module, runtime: ZeroRuntime) -> dict[str, LogicalTensor]:
    """Every weight and buffer of the whole model, whichever rank holds it."""
    found = {}
    for unit in runtime.units:
        memory = unit.weights.resting if unit.main is None else unit.main
        for spec in unit.layout.params:
            found[f"weights/{spec.name}"] = LogicalTensor(dtype_name(memory.dtype), spec.shape)
    for name, param in model.named_parameters():
        full = f"weights/{name}"
        found.setdefault(full, LogicalTensor(dtype_name(param.dtype), tuple(param.shape)))
    for name, buffer in kept_buffers(model):
        found[f"buffers/{name}"] = LogicalTensor(dtype_name(buffer.dtype), tuple(buffer.shape))
    return found


def _optimizer_state(
    optimizer: LocalOptimizer, run: Run, held: Mapping[str, LogicalTensor]
) -> list[Part]:
    """Makes the state tensors that the source has for a run's group; a run may be all padding."""
    names = {spec.name for spec in run.unit.layout.params if spec.group == run.group}
    keys = {
        prefix.removeprefix("optimizer."): one.dtype
        for full, one in held.items()
        for prefix, _, name in [full.partition("/")]
        if prefix.startswith("optimizer.") and name in names
    }
    made = []
    for key, dtype in sorted(keys.items()):
        floats = DTYPES[dtype].is_floating_point
        kind = run.weight.dtype if floats else DTYPES[dtype]
        value = run.unit.home.zeros(run.weight.numel(), kind)
        optimizer.torch.state[run.weight][key] = value
        made.append(optimizer_part(run, key, value))
    return made


def _carry_out(copies: Sequence[Copy], of: Mapping[Range, Part], source: StateSource) -> None:
    """Reads each copy's bytes, in the order in which they lie."""
    tables = source.tables
    placed: defaultdict[int, list[tuple[int, Copy]]] = defaultdict(list)
    for copy in copies:
        size = tables[copy.source].tensors[copy.held.name].item_bytes
        at = copy.held.offset + (copy.start - copy.held.start) * size
        placed[copy.source].append((at, copy))
    for block, reads in placed.items():
        for at, copy in sorted(reads, key=lambda read: read[0]):
            first = copy.wanted.offset + copy.start - copy.wanted.start
            target = of[copy.wanted].memory[first : first + copy.count]
            dtype = DTYPES[tables[block].tensors[copy.held.name].dtype]
            _read(source, block, at, target, dtype)


def _read(source: StateSource, block: int, at: int, target: Tensor, dtype: torch.dtype) -> None:
    """Straight into the target where it is host memory of that dtype, through a copy elsewhere."""
    direct = target.dtype is dtype and target.device.type == "cpu"
    landing = target if direct else torch.empty(target.numel(), dtype=dtype)
    source.read(block, at, landing.view(torch.uint8).numpy().data)
    if not direct:
        target.copy_(landing)
