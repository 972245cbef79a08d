"""The table of DeepSpeed's names: each is importable, and works or is refused as it says."""

from __future__ import annotations

import json

import pytest

from tests.support.scripts import run_script

CHECK = """
import importlib, json
import rayzero.deepspeed; rayzero.deepspeed.install()
from rayzero.deepspeed.lookup import MODULES, REFUSED, REFUSED_PACKAGES, working_names
wrong = []
def get(module, name):
    return getattr(importlib.import_module(".".join(filter(None, ("deepspeed", module)))), name)
for module in ("", *MODULES):
    for name in working_names(module):
        try:
            if type(get(module, name)).__name__ == "_Refusing":
                wrong.append(f"{module}.{name} is refused")
        except Exception as error:
            wrong.append(f"{module}.{name}: {error!r}")
def refuses(module, name, use):
    try:
        get(module, name)(1, a=2)
        wrong.append(f"{module}.{name} works")
    except ValueError as error:
        if use not in str(error) or name not in str(error) or "\\n" in str(error):
            wrong.append(f"{module}.{name}: {error}")
for module, names in REFUSED.items():
    for name, use in names.items() if module not in ("DeepSpeedEngine", "Accelerator") else ():
        refuses(module, name, use)
for module, use in REFUSED_PACKAGES.items():
    refuses(module, "Anything", use)
    refuses(f"{module}.deeper.still", "Anything", use)
"""


SURFACE = """
import torch
from rayzero.deepspeed.accelerator import get_accelerator
from tools.deepspeed_names import PAGE, render
from tools.deepspeed_surface import FILE
surface = json.loads(FILE.read_text())
for module in surface["modules"]:
    try:
        importlib.import_module(f"deepspeed.{module}")
    except ImportError as error:
        wrong.append(str(error))
for name, value in surface["constants"].items():
    here = getattr(importlib.import_module("deepspeed.runtime.constants"), name)
    if json.dumps(here) != json.dumps(value):
        wrong.append(f"{name} is {here}, {value} in DeepSpeed")
for full in surface["used"] + surface["exported"]:
    parts, value = full.split("."), None
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        break
    try:
        for name in parts[count:]:
            value = getattr(value, name)
    except AttributeError as error:
        wrong.append(f"{full}: {error}")
config = {"train_batch_size": 1, "optimizer": {"type": "SGD"}}
engine, *_ = rayzero.initialize(model=torch.nn.Linear(2, 1), config=config)
for kind, value, refused in (
    ("engine", engine, REFUSED["DeepSpeedEngine"]),
    ("accelerator", get_accelerator(), REFUSED["Accelerator"]),
):
    for name in surface[kind]:
        if hasattr(value, name) is (name in refused):
            wrong.append(f"{kind}.{name}")
if PAGE.read_text() != render():
    wrong.append("docs/deepspeed-names.md is old: python -m tools.deepspeed_names")
print(json.dumps([len(surface["used"] + surface["exported"]), wrong]))
"""


@pytest.mark.slow
def test_every_name_of_deepspeed_works_or_is_refused_as_the_table_says() -> None:
    """Its modules and constants, what its packages export, and what libraries use; names of the
    table."""
    done = run_script("-c", CHECK + SURFACE)
    assert done.returncode == 0, done.stderr[-3000:]
    count, wrong = json.loads(done.stdout)
    assert count > 161
    assert wrong == []
