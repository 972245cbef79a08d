"""Plans units: the parameters that are gathered and reduced together.

Replicated weights form buckets by size; sharded weights form units along the blocks of the module
tree. A unit has one dtype and is trainable or frozen as a whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from rayzero.engine.device import Device
from rayzero.engine.errors import ConfigError, did_you_mean
from rayzero.engine.layout.flat_layout import ParamSpec, UnitLayout, make_layout
from rayzero.engine.layout.leaf_modules import modules_inside_leaves
from rayzero.engine.layout.packed import is_packed
from rayzero.engine.torch_private import is_compiled

USED_ELSEWHERE = "rayzero_used_elsewhere"
"""A parameter has this attribute if it is read outside the forward of its module."""


@dataclass(frozen=True)
class NamedParam:
    """A parameter of the model under its first name. `group` is its optimizer parameter group; None
    if it is frozen."""

    name: str
    param: nn.Parameter
    group: int | None

    @property
    def buffer_kind(self) -> tuple[torch.dtype, bool, bool]:
        """Dtype, whether trainable, whether quantized. Equal kinds may share a flat buffer."""
        return self.param.dtype, self.group is not None, is_packed(self.param)


@dataclass(frozen=True)
class UnitPlan:
    """A unit before its buffers exist. `params` are in the layout's order.

    `module` is the module whose forward needs the unit gathered; None if weights are replicated.
    """

    layout: UnitLayout
    params: tuple[nn.Parameter, ...]
    trainable: bool
    module: nn.Module | None = None


def name_params(model: nn.Module, groups: Mapping[nn.Parameter, int]) -> list[NamedParam]:
    """Returns the model's parameters in registration order, without those that have no elements.

    `groups` maps each trainable parameter to its optimizer parameter group.
    """
    return [
        NamedParam(name, param, groups.get(param))
        for name, param in model.named_parameters()
        if param.numel()
    ]


def plan_buckets(
    params: Sequence[NamedParam],
    bucket_numel: int | None,
    world_size: int,
    max_numel: int | None = None,
    limits: tuple[int, int] = Device.bucket_numel,
) -> list[UnitPlan]:
    """Returns buckets of trainable parameters: of at most `bucket_numel` elements, or of a single
    parameter.

    Parameters are in reverse registration order, which is about the order in which gradients become
    ready. By default a bucket is an eighth of the model, so that reductions start early in
    backward, but within the device's `limits`, which amortise the latency of a reduction.
    `max_numel` is a further limit of a bucket; None or 0 for no limit.
    """
    trainable = [member for member in params if member.group is not None]
    if bucket_numel is None:
        eighth = _total_numel(trainable) // 8
        bucket_numel = min(max(eighth, limits[0]), limits[1])
    bucket_numel = min(bucket_numel, max_numel or bucket_numel)
    plans: list[UnitPlan] = []
    open_buckets: dict[object, list[NamedParam]] = {}
    for member in reversed(trainable):
        bucket = open_buckets.setdefault(member.buffer_kind, [])
        if bucket and _total_numel([*bucket, member]) > bucket_numel:
            plans.append(_make_plan(f"bucket{len(plans)}", bucket, world_size))
            bucket = open_buckets[member.buffer_kind] = []
        bucket.append(member)
    for bucket in open_buckets.values():
        plans.append(_make_plan(f"bucket{len(plans)}", bucket, world_size))
    return plans


def find_blocks(model: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    """Returns the blocks (see `plan_blocks`) other than the model itself."""
    inside = modules_inside_leaves(model, experts=not classes)
    found = dict.fromkeys(block for _, block in _find_blocks(model, classes))
    return [block for block in found if block not in inside]


def find_large_modules(model: nn.Module, classes: Sequence[str], min_numel: int) -> list[nn.Module]:
    """Returns the modules outside of blocks that own at least `min_numel` elements; none if that is
    0. Typically an embedding and a head, unless they are tied.

    Not counted are parameters that several modules share, that are inside a compiled module, or
    that are read elsewhere. Modules without a forward are left out, and so is the output projection
    of `nn.MultiheadAttention`, which reads it without calling it.
    """
    blocks = set(find_blocks(model, classes)) | modules_inside_leaves(model, experts=not classes)
    owned: dict[nn.Module, int] = {}
    for param, uses in _find_uses(model).items():
        owners = {path[-1] for path in uses}
        inside = {module for path in uses for module in path[:-1]}
        if (
            len(owners) == 1
            and not hasattr(param, USED_ELSEWHERE)
            and not (owners | inside) & blocks
            and not any(map(is_compiled, inside))
        ):
            owner = owners.pop()
            owned[owner] = owned.get(owner, 0) + param.numel()
    owned.pop(model, None)
    return [
        module
        for module, numel in owned.items()
        if min_numel and numel >= min_numel
        if type(module).forward is not nn.Module.forward
        if not isinstance(module, NonDynamicallyQuantizableLinear)
    ]


def plan_blocks(
    model: nn.Module,
    params: Sequence[NamedParam],
    classes: Sequence[str],
    world_size: int,
    large: Sequence[nn.Module] = (),
) -> list[UnitPlan]:
    """Assigns every parameter to a unit of the innermost block that contains all of its uses.

    `classes` are the class names of the modules that are blocks. If there are none, the blocks are
    the elements of every ModuleList, and of every Sequential that is not inside a block. Modules in
    `large`, and the model itself, are blocks too. Raises ConfigError if the model has no module of
    a class.
    """
    chosen = {*find_blocks(model, classes), *large}
    # In registration order. A block that is registered several times has its first name.
    paths = {model: "root"}
    paths |= {block: path for path, block in model.named_modules() if block in chosen}
    uses = _find_uses(model)
    members_of: dict[nn.Module, list[NamedParam]] = {block: [] for block in paths}
    for member in params:
        members_of[_innermost_common_block(uses[member.param], members_of)].append(member)
    plans = []
    for block, members in members_of.items():
        members.sort(key=lambda member: str(member.buffer_kind))
        mixed = len({member.param.dtype for member in members}) > 1
        kinds = groupby(members, key=lambda member: member.buffer_kind)
        for (dtype, trainable, packed), alike in kinds:
            name = paths[block] + (f" ({dtype})" if mixed else "")
            if packed:
                name += " (quantized)"
            elif not trainable:
                name += " (frozen)"
            plans.append(_make_plan(name, list(alike), world_size, block))
    return plans


def _find_blocks(model: nn.Module, classes: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    if not classes:
        yield from _repeated_blocks(model, "", inside_block=False)
        return
    classes_seen = sorted({type(module).__name__ for module in model.modules()})
    for name in classes:
        if name not in classes_seen:
            raise ConfigError(
                f"rayzero.unshard_modules: the model has no module of class {name!r}"
                f"{did_you_mean(name, classes_seen)}"
            )
    for path, module in model.named_modules():
        if path and type(module).__name__ in classes:
            yield path, module


def _repeated_blocks(
    module: nn.Module, path: str, *, inside_block: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Yields (path, module) of the elements of every ModuleList, and of every Sequential that is
    not inside a block."""
    elements = isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.Sequential) and not inside_block
    )
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        container = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        block = elements and not container and any(True for _ in child.parameters())
        if block:
            yield child_path, child
        yield from _repeated_blocks(child, child_path, inside_block=inside_block or block)


def _find_uses(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, ...]]]:
    """Returns, by parameter, the paths from the model to each module that owns the parameter."""
    uses: dict[nn.Parameter, list[tuple[nn.Module, ...]]] = {}
    for modules in _module_paths(model):
        for param in modules[-1].parameters(recurse=False):
            uses.setdefault(param, []).append(modules)
    return uses


def _module_paths(
    module: nn.Module, above: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[nn.Module, ...]]:
    """Yields every path in the module tree from the model to a module, both included."""
    path = (*above, module)
    yield path
    for child in module.children():
        yield from _module_paths(child, path)


def _innermost_common_block(
    uses: Sequence[tuple[nn.Module, ...]], blocks: Container[nn.Module]
) -> nn.Module:
    """Returns the innermost block on the paths to all uses."""
    common = set(uses[0]).intersection(*uses[1:])
    return next(module for module in reversed(uses[0]) if module in blocks and module in common)


def _make_plan(
    name: str, members: Sequence[NamedParam], world_size: int, block: nn.Module | None = None
) -> UnitPlan:
    members = sorted(members, key=lambda member: member.group or 0)
    specs = [
        ParamSpec(member.name, tuple(member.param.shape), member.group or 0) for member in members
    ]
    layout = make_layout(name, specs, world_size)
    params = tuple(member.param for member in members)
    return UnitPlan(layout, params, members[0].group is not None, block)


def _total_numel(members: Iterable[NamedParam]) -> int:
    return sum(member.param.numel() for member in members)
