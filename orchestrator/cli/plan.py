"""`rayzero plan`: what a model would need, printed."""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from rayzero.engine.config import read_config
from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.orchestrator.event_text import print_error
from rayzero.workers.entrypoint import EntryPointError, resolve_entrypoint

GIB, MIB = 2**30, 2**20
PIPE_WIDTH = 200
MEMORY_CLASSES = (
    "model_weights",
    "main_weights",
    "main_grads",
    "optimizer_state",
    "slots",
    "activations",
)
OPTIONAL_CLASSES = (
    "error_feedback",
    "second_shards",
    "staging",
    "grad_copies",
)  # shown where there are any
DEFAULT_CONFIG = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def plan_model(
    model: str,
    batch: str | None,
    engine: Path | None,
    world_size: int,
    gpu: str | None,
    as_json: bool,
) -> int:
    """Exit code 0; 1 when nothing fits; 2 for a mistake in what was given."""
    try:
        gpu_bytes = None if gpu is None else _parse_bytes(gpu)
        sys.path.insert(0, "")  # the user's modules, as for `rayzero run`
        document = DEFAULT_CONFIG if engine is None else read_config(engine)
        # By name: they need torch, which nothing else here does.
        planner_of = import_module("rayzero.engine.planning.search").MemoryPlanner
        choosing = import_module("rayzero.engine.planning.search")
        planner = planner_of(_resolve_function(model), _resolve_function(batch) if batch else None)
        found = choosing.evaluate_settings(planner, document, world_size, gpu_bytes)
        taken = choosing.first_fit(found)
    except RayzeroError as error:
        print_error(error)
        return 2 if isinstance(error, ConfigError) else 1
    except Exception as error:  # noqa: BLE001  # the user's functions and model are called here
        print_error(_user_code_error(error))
        return 2
    if as_json:
        print(json.dumps([_choice_json(one, one is taken) for one in found]))
    else:
        _print_table(found, taken, batch is not None, gpu_bytes)
    return int(gpu_bytes is not None and taken is None)


def _resolve_function(name: str) -> Any:
    if ":" not in name:
        raise ConfigError(
            f"{name!r} names no function",
            allowed="module:function, such as models:make",
            fix="the first argument, or --batch",
        )
    try:
        return resolve_entrypoint(name)
    except EntryPointError as error:
        seen = error.seen.removeprefix("entrypoint ")
        raise ConfigError(
            seen, allowed="module:function", fix="the first argument, or --batch"
        ) from error.__cause__


def _user_code_error(error: Exception) -> ConfigError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if "site-packages" not in one.filename]
    last = (own or frames)[-1]
    return ConfigError(
        f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno}, in {last.name})",
        allowed="a function without arguments that builds the model; as --batch, one of a number "
        "of samples that makes what the model is called with",
        fix="the first argument, or --batch",
    )


def _parse_bytes(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise ConfigError(
            f"--gpu {text!r} is no size", allowed="a number with a unit: 80GB, 24GiB", fix="--gpu"
        ) from None


def _choice_json(choice: Any, taken: bool) -> dict[str, Any]:
    estimate = choice.estimate
    return {
        "setting": choice.setting.name,
        "device_bytes": estimate.device_bytes,
        "host_bytes": estimate.host_bytes,
        "disk_bytes": estimate.disk_bytes,
        "device_total_bytes": estimate.device_total_bytes,
        "host_total_bytes": estimate.host_total_bytes,
        "flops": estimate.flops,
        "fits": choice.fits,
        "chosen": taken,
    }


def _print_table(found: list[Any], taken: Any, traced: bool, gpu_bytes: int | None) -> None:
    largest = max(one.estimate.device_total_bytes for one in found)
    unit, name_of = (GIB, "GiB") if largest >= GIB // 10 else (MIB, "MiB")
    table = Table("setting", title=f"{name_of} on each rank", title_justify="left")
    classes = [name for name in MEMORY_CLASSES if name != "activations" or traced]
    classes += [
        name
        for name in OPTIONAL_CLASSES
        if any(one.estimate.device_bytes.get(name) for one in found)
    ]
    for name in (*classes, "total", "host"):
        table.add_column(name.replace("_", " "), justify="right")
    for one in found:
        estimate = one.estimate
        cells = [estimate.device_bytes.get(name, 0) for name in classes]
        cells += [estimate.device_total_bytes, estimate.host_total_bytes]
        style = "bold" if one is taken else "dim" if one.fits is False else None
        table.add_row(one.setting.name, *(f"{size / unit:.2f}" for size in cells), style=style)
    # A file or a pipe takes whole lines.
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH)
    console.print(table)
    if not traced:
        console.print("Without --batch, activations are not in it.")
    if gpu_bytes is None:
        return
    size = f"{gpu_bytes / unit:.1f} {name_of}"
    if taken is None:
        console.print(f"Nothing fits {size}: more ranks, or a smaller micro-batch.")
    else:
        console.print(f"Take {taken.setting.name}: the first that fits {size}.")
