"""Leaf modules of stage 3: the modules inside a leaf module are not gathered separately.

Gathers are collective, so all ranks must gather the same units in the same order. In a mixture of
experts the samples of different ranks choose different experts. If each expert were a block, one
rank would gather an expert that another rank does not, and both would wait forever. Therefore the
weights of a leaf module are gathered with the block around it, or with the model if there is no
such block: every rank runs these. Weights that a rank did not use get zeros as this rank's term of
the gradient.

A `ModuleList` or `ModuleDict` called `experts` is treated as a leaf unless
`rayzero.unshard_modules` names the blocks. The functions have the names of those in
`deepspeed.utils`, and must be called before `initialize`.
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
    """Returns whether this module is a leaf."""
    return bool(getattr(model, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Makes a module a leaf, or (`flag` false) an ordinary module again."""
    vars(model)["_z3_leaf"] = flag


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Makes all modules of these classes leaves, and returns the modules. A class may be given as a
    class, its name, or its name with its Python module. Raises ConfigError if the model has no such
    module."""
    return _set_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Makes modules of these classes ordinary modules again. Returns and raises as
    `set_z3_leaf_modules`."""
    return _set_by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Makes the modules of these names leaves, or (`flag` false) ordinary. Returns the modules, and
    the names that no module has. Raises ConfigError if there are such names."""
    return _set_where(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Makes the modules whose names end with these suffixes leaves, or ordinary. Returns the
    modules, and the suffixes that no module has. Raises ConfigError if there are such suffixes."""
    return _set_where(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def apply_leaf_names(model: nn.Module, leaves: LeafModuleConfig) -> None:
    """Makes the modules that `zero_optimization.leaf_module` names leaves. A name without a module
    is only logged, because several models may use the same config."""
    missing = [name for name in leaves.classes if not _set_by_class(model, [name], True, False)]
    missing += set_z3_leaf_modules_by_name(model, leaves.names, True, False)[1]
    missing += set_z3_leaf_modules_by_suffix(model, leaves.name_suffixes, True, False)[1]
    if missing:
        log.warning("zero_optimization.leaf_module: the model has no %s", ", ".join(missing))


def modules_inside_leaves(model: nn.Module, *, experts: bool) -> set[nn.Module]:
    """Returns the modules inside leaves; with `experts`, also those inside containers called
    `experts`."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if z3_leaf_module(module) or (
            experts and container and name.rpartition(".")[2] == "experts"
        ):
            inside.update(child for child in module.modules() if child is not module)
    return inside


def _set_by_class(
    model: nn.Module, classes: Classes, flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    found = [module for module in model.modules() if any(_is_a(module, kind) for kind in classes)]
    for module in found:
        set_z3_leaf_module(module, flag)
    if not found and raise_if_not_found:
        names = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in classes)
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
    found = [module for name, module in named.items() if any(fits(name, text) for text in wanted)]
    for module in found:
        set_z3_leaf_module(module, flag)
    missing = [text for text in wanted if not any(fits(name, text) for name in named)]
    if missing and raise_if_not_found:
        raise ConfigError(f"leaf modules: the model has no module called {', '.join(missing)}")
    return found, missing
