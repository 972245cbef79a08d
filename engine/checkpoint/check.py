"""Does a saved state fit a model?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rayzero.engine.errors import ConfigError
from rayzero.engine.state.table import LogicalTensor

_SHOWN = 3


class CheckpointMismatchError(ConfigError):
    """A state of another model: names or shapes differ."""


def check_fits(wanted: Mapping[str, LogicalTensor], held: Mapping[str, LogicalTensor]) -> None:
    """Compares names and shapes; dtypes may differ.

    Args:
        wanted: the model's tensors.
        held: the state's.

    Raises:
        CheckpointMismatchError: which are missing, which are too many, and whose shape differs.
    """
    missing = [name for name in wanted if name not in held]
    foreign = [name for name in held if name not in wanted]
    shapes = [
        f"{name} is {list(held[name].shape)} in the state and {list(one.shape)} in the model"
        for name, one in wanted.items()
        if name in held and held[name].shape != one.shape
    ]
    told = [
        f"{len(found)} {what}: {_some(found)}"
        for what, found in (
            ("tensors of the model are not in it", missing),
            ("of its tensors are not in the model", foreign),
            ("tensors have another shape", shapes),
        )
        if found
    ]
    if told:
        raise CheckpointMismatchError(
            "the saved state is another model's: " + "; ".join(told),
            allowed="a state with the model's parameters and buffers, by name and shape",
            fix="the model, or which checkpoint is resumed from (checkpoint.resume)",
        )


def _some(found: Iterable[str]) -> str:
    found = list(found)
    return ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
