"""Leaf modules of stage 3: modules inside which nothing is gathered on its own.

Gathers are collective, so every rank must make the same ones. In a mixture of experts each rank's
samples choose other experts: were each expert a block, one rank would gather what another does not,
and both would wait forever. A leaf module's weights are gathered with the block around it instead
(with the model, if there is none), which every rank runs; what a rank did not use gets zeros as its
term of the gradient.

A `ModuleList` or `ModuleDict` called `experts` is treated as a leaf unless
`rayzero.unshard_modules` names the blocks. The names are those of `deepspeed.utils`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import nn

from rayzero.engine.config.zero import LeafModuleConfig
from rayzero.engine.errors import ConfigError

log = logging.getLogger("rayzero.engine")

Classes = Sequence[type[nn.Module] | str]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is a leaf."""
    return bool(getattr(model, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Before `initialize`, as all of these."""
    vars(model)["_z3_leaf"] = flag


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Makes modules of these classes leaves: a class, its name, or its name with its module's.
    Returns them. Raises ConfigError if there are none."""
    return _set_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Makes them ordinary modules again."""
    return _set_by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """The modules of these names, and the names that no module has."""
    return _set_where(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """The modules whose names end so, and the suffixes that none has."""
    return _set_where(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def apply_leaf_names(model: nn.Module, leaves: LeafModuleConfig) -> None:
    """Makes what `zero_optimization.leaf_module` names leaves; a name that fits nothing is logged,
    because one file may serve several models."""
    missing = [it for it in leaves.classes if not _set_by_class(model, [it], True, False)]
    missing += set_z3_leaf_modules_by_name(model, leaves.names, True, False)[1]
    missing += set_z3_leaf_modules_by_suffix(model, leaves.name_suffixes, True, False)[1]
    if missing:
        log.warning("zero_optimization.leaf_module: the model has no %s", ", ".join(missing))


def modules_inside_leaves(model: nn.Module, *, experts: bool) -> set[nn.Module]:
    """The modules below leaves; with `experts`, also those below containers of that name."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if z3_leaf_module(module) or (
            experts and container and name.rpartition(".")[2] == "experts"
        ):
            inside.update(it for it in module.modules() if it is not module)
    return inside


def _set_by_class(
    model: nn.Module, classes: Classes, flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    found = [it for it in model.modules() if any(_is_a(it, each) for each in classes)]
    for module in found:
        set_z3_leaf_module(module, flag)
    if not found and raise_if_not_found:
        names = ", ".join(it if isinstance(it, str) else it.__name__ for it in classes)
        raise ConfigError(f"leaf modules: the model has no module of class {names}")
    return found


def _is_a(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    if not isinstance(wanted, str):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _set_where(
    model: nn.Module,
    wanted: Sequence[str],
    fits: Callable[[str, str], bool],
    flag: bool,
    raise_if_not_found: bool,
) -> tuple[list[nn.Module], list[str]]:
    named = dict(model.named_modules())
    found = {name: it for name, it in named.items() if any(fits(name, each) for each in wanted)}
    for module in found.values():
        set_z3_leaf_module(module, flag)
    missing = [each for each in wanted if not any(fits(name, each) for name in named)]
    if missing and raise_if_not_found:
        raise ConfigError(f"leaf modules: the model has no module called {', '.join(missing)}")
    return list(found.values()), missing
