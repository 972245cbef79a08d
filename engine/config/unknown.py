"""Unknown keys where DeepSpeed ignores them: near no known key they are left out with a warning."""

from __future__ import annotations

from typing import Any

from rayzero.engine.config.model import KEYS
from rayzero.engine.config.normalize import OLD_NAMES, get_path
from rayzero.engine.config.optimizers import OPTIMIZER_PARAMS
from rayzero.engine.config.schedules import LR_CURVES
from rayzero.engine.errors import did_you_mean

_IGNORING_SECTIONS = (
    *("", "optimizer", "scheduler", "torch_autocast", "data_types"),
    *("activation_checkpointing", "checkpoint"),
)
"""What DeepSpeed reads key by key; it validates the other sections as a whole."""

_PARAMS = {
    f"{section}.{param}"
    for section, models in (("optimizer", OPTIMIZER_PARAMS), ("scheduler", LR_CURVES))
    for model in models.values()
    for param in model.model_fields
}
"""What belongs in `params`: next to them it would be left out, and training continue without it."""

_FOREIGN = {"fp16_opt_level"}
"""Keys of other libraries in public files, here Apex's, that resemble a known one."""

_PATHS = {*KEYS, *(name.old for name in OLD_NAMES)}


def _names_in(section: str) -> set[str]:
    prefix = f"{section}." if section else ""
    return {
        path.removeprefix(prefix).partition(".")[0] for path in _PATHS if path.startswith(prefix)
    }


def drop_unknown(document: dict[str, Any]) -> list[str]:
    """Removes such keys from a document, in place; returns their paths. A key that resembles a
    known one, or is one of another section, stays: validation refuses it."""
    dropped = []
    for section in _IGNORING_SECTIONS:
        values = get_path(document, section) if section else document
        known = _names_in(section)
        for name in [*values] if isinstance(values, dict) else ():
            near = sorted(_PATHS) if "." in name else sorted(known)
            path = f"{section}.{name}" if section else name
            is_misplaced = path in _PARAMS or _belongs_elsewhere(name)
            resembles = did_you_mean(name, near) and name not in _FOREIGN
            if name in known or resembles or is_misplaced:
                continue
            del values[name]
            dropped.append(path)
    return dropped


def _belongs_elsewhere(name: str) -> bool:
    return any(path.endswith(f".{name}") for path in _PATHS)
