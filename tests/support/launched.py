"""The libraries of launched scripts as their workers import them: with rayzero's adapters.

For a fork server alone: importing them takes a process longer than most scripts of tests train.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from rayzero.orchestrator.spec_sections import SCRIPT_ADAPTERS
from rayzero.workers.launch.adapters import install_adapters

_LIBRARIES = (
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "accelerate",
    "peft",
)

install_adapters(SCRIPT_ADAPTERS)
for _name in _LIBRARIES:
    if find_spec(_name.partition(".")[0]):
        import_module(_name)
