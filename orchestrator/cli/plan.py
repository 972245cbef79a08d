"""`rayzero plan`: estimate a model's memory for every ZeRO stage."""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.orchestrator.cli.command import JsonValueFlag, local_command, new_group

commands = new_group()

GIB, MIB = 2**30, 2**20
PIPE_WIDTH = 200  # columns where stdout is no terminal
MEMORY_CLASSES = (
    "model_weights",
    "main_weights",
    "main_grads",
    "optimizer_state",
    "slots",
    "grad_slots",
    "activations",
    "unit_grads",
    *("error_feedback", "second_shards", "staging", "grad_copies"),
)
"""Columns of the table, without those that no setting needs."""
DEFAULT_CONFIG = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@commands.command(
    epilog="Example: rayzero plan models:make --batch models:batch --world 8 --gpu 80GB"
)
@local_command
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Function that builds the model. No memory is allocated for it.",
            metavar="MODULE:FUNCTION",
        ),
    ],
    batch: Annotated[
        str | None,
        typer.Option(
            help="Function that takes a number of samples and returns a micro-batch. Without it, "
            "activations are not estimated.",
            metavar="MODULE:FUNCTION",
        ),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(
            help="Engine config; its ZeRO stage is varied. Default: fp32 with AdamW.",
            metavar="FILE",
        ),
    ] = None,
    world: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 1,
    gpu: Annotated[
        str | None, typer.Option(help="Memory of one GPU, to find what fits.", metavar="80GB")
    ] = None,
    as_json: JsonValueFlag = False,
) -> int:
    """Estimate each GPU's memory by class, for every stage, and select the first that fits.

    Exit code 0: estimated. 1: nothing fits. 2: a mistake in the arguments or the model's function.
    """
    from rayzero.engine.config import read_config

    gpu_bytes = None if gpu is None else _parse_bytes(gpu)
    sys.path.insert(0, "")  # the user's modules, as for `rayzero run`
    document = DEFAULT_CONFIG if engine is None else read_config(engine)
    # By name: it imports torch, which the orchestrator must not (see the import contracts).
    search = import_module("rayzero.engine.planning.search")
    try:
        planner = search.MemoryPlanner(
            _resolve_function(model), _resolve_function(batch) if batch else None
        )
        results = search.evaluate_settings(planner, document, world, gpu_bytes)
    except RayzeroError:
        raise
    except Exception as error:  # noqa: BLE001  # the user's functions and model are called here
        raise _user_code_error(error) from None
    best = search.first_fit(results)
    if as_json:
        print(json.dumps([_result_json(result, result is best) for result in results]))
    else:
        _print_table(results, best, batch is not None, gpu_bytes)
    return int(gpu_bytes is not None and best is None)


def _resolve_function(name: str) -> Any:
    from rayzero.workers.entrypoint import EntryPointError, resolve_entrypoint

    if ":" not in name:
        raise ConfigError(
            f"{name!r} is not the name of a function",
            allowed="module:function, such as models:make",
            fix="MODULE:FUNCTION or --batch",
        )
    try:
        return resolve_entrypoint(name)
    except EntryPointError as error:
        seen = error.seen.removeprefix("entrypoint ")
        fix = "MODULE:FUNCTION or --batch"
        raise ConfigError(seen, allowed="module:function", fix=fix) from error.__cause__


def _user_code_error(error: Exception) -> ConfigError:
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if "site-packages" not in frame.filename]
    last = (user_frames or frames)[-1]
    return ConfigError(
        f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno}, in {last.name})",
        allowed="a function without arguments that returns the model; for --batch, a function of "
        "the number of samples that returns the model's input",
        fix="MODULE:FUNCTION or --batch",
    )


def _parse_bytes(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise ConfigError(
            f"--gpu {text!r} is not a size",
            allowed="a number with a unit: 80GB, 24GiB",
            fix="--gpu",
        ) from None


def _result_json(result: Any, chosen: bool) -> dict[str, Any]:
    estimate = result.estimate
    return {
        "setting": result.setting.name,
        "device_bytes": estimate.device_bytes,
        "host_bytes": estimate.host_bytes,
        "disk_bytes": estimate.disk_bytes,
        "device_total_bytes": estimate.device_total_bytes,
        "host_total_bytes": estimate.host_total_bytes,
        "flops": estimate.flops,
        "cpu_update_thread_s": estimate.cpu_update_s,
        "fits": result.fits,
        "chosen": chosen,
    }


def _print_table(results: list[Any], best: Any, traced: bool, gpu_bytes: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    largest = max(result.estimate.device_total_bytes for result in results)
    unit, unit_name = (GIB, "GiB") if largest >= GIB // 10 else (MIB, "MiB")
    table = Table("setting", title=f"{unit_name} on each rank", title_justify="left")
    classes = [
        name
        for name in MEMORY_CLASSES
        if any(result.estimate.device_bytes.get(name) for result in results)
    ]
    for name in (*classes, "total", "host"):
        table.add_column(name.replace("_", " "), justify="right")
    for result in results:
        estimate = result.estimate
        sizes = [estimate.device_bytes.get(name, 0) for name in classes]
        sizes += [estimate.device_total_bytes, estimate.host_total_bytes]
        style = "bold" if result is best else "dim" if result.fits is False else None
        table.add_row(result.setting.name, *(f"{size / unit:.2f}" for size in sizes), style=style)
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if has_width else PIPE_WIDTH)
    console.print(table)
    if not traced:
        console.print("Activations are not included: they need --batch.")
    offloaded = results if gpu_bytes is None else [best] if best else []
    one_s = max((it.estimate.cpu_update_s for it in offloaded), default=0.0)
    if one_s:
        console.print(
            f"An optimizer on the CPU takes about {one_s:.2g} s a step on one thread of each rank, "
            f"{one_s / 12:.2g} s on 12: leave workers.cpus unset, or set it to the node's CPUs / "
            "its GPUs."
        )
    if gpu_bytes is None:
        return
    size = f"{gpu_bytes / unit:.1f} {unit_name}"
    if best is None:
        console.print(f"Nothing fits in {size}: use more ranks or a smaller micro-batch.")
    else:
        console.print(f"Use {best.setting.name}: the first that fits in {size}.")
