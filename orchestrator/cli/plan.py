"""`rayzero plan`: estimate a model's memory for every ZeRO stage."""

from __future__ import annotations

import json
import sys
import textwrap
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.engine.planning import USABLE_FRACTION
from rayzero.orchestrator.cli.command import JsonValueFlag, local_command, new_group
from rayzero.orchestrator.top.format import format_size, plain_class

commands = new_group()

GIB, MIB = 2**30, 2**20
COLUMNS = {
    "weights": ("model_weights", "main_weights", "second_shards"),
    "gradients": ("main_grads", "unit_grads"),
    "optimizer": ("optimizer_state", "grad_copies"),
    "buffers": ("slots", "grad_slots", "error_feedback", "staging"),
    "activations": ("activations",),
}
"""The table's columns, and the memory classes (of `engine.accounting`, and `activations`) that each
column sums."""
GPU_GIB = {
    "b200": 178.3,
    "h200": 139.7,
    "h100": 79.1,
    "a100": 79.1,
    "a100-40gb": 39.4,
    "a40": 44.3,
    "l40s": 44.3,
    "l40": 44.3,
    "a10": 22.0,
    "a10g": 22.0,
    "l4": 21.9,
    "v100": 15.7,
    "v100-32gb": 31.7,
    "t4": 14.5,
    "rtx5090": 31.3,
    "rtx4090": 23.5,
    "rtx3090": 23.5,
    "a6000": 47.4,
}
"""Memory that a process can use, approximately. The values of the A100, L40, V100 and RTX 4090 are
from messages of torch.cuda. For the others, it is the nominal memory, less the share that error
correction and the driver take of these four."""
DEFAULT_CONFIG = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@commands.command(
    epilog="Example: rayzero plan models:make --batch models:batch --world 8 --gpu h100"
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
        str | None,
        typer.Option(
            help="One GPU, to find what fits: its name (h100), or its memory (80, 80GB, 24GiB).",
            metavar="GPU",
        ),
    ] = None,
    as_json: JsonValueFlag = False,
) -> int:
    """Estimate each GPU's memory by class, for every stage, and select the first that fits.

    Exit code 0: estimated. 1: nothing fits. 2: a mistake in the arguments or the model's function.
    """
    from rayzero.engine.config import read_config

    gpu_bytes = None if gpu is None else _parse_gpu(gpu)
    sys.path.insert(0, "")  # the user's modules, as for `rayzero run`
    document = DEFAULT_CONFIG if engine is None else read_config(engine)
    # By name: the module imports torch, which the orchestrator must not (see the import contracts).
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
            fix="change MODULE:FUNCTION or --batch",
        )
    try:
        return resolve_entrypoint(name)
    except EntryPointError as error:
        seen = error.seen.removeprefix("entrypoint ")
        fix = "change MODULE:FUNCTION or --batch"
        raise ConfigError(seen, allowed="module:function", fix=fix) from error.__cause__


def _user_code_error(error: Exception) -> ConfigError:
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if "site-packages" not in frame.filename]
    last = (user_frames or frames)[-1]
    return ConfigError(
        f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno}, in {last.name})",
        allowed="a function without arguments that returns the model; for --batch, a function of "
        "the number of samples that returns the model's input",
        fix="change MODULE:FUNCTION or --batch",
    )


def _parse_gpu(text: str) -> int:
    """Returns the memory in bytes of a GPU, given by its name or its size. A plain number is GB."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    name = text.lower().replace(" ", "").replace("_", "-").removeprefix("nvidia-")
    name = name.removesuffix("-80gb")
    if name in GPU_GIB:
        return int(GPU_GIB[name] * GIB)
    size = f"{text}GB" if text.strip().replace(".", "", 1).isdigit() else text
    try:
        if number := int(TypeAdapter(ByteSize).validate_python(size)):
            return number
    except ValidationError:
        pass
    raise ConfigError(
        f"--gpu {text!r} is neither a size nor a GPU that is known",
        allowed=f"a size, such as 80GB or 24GiB (without a unit: GB), or {', '.join(GPU_GIB)}",
        fix="change --gpu",
    )


def _result_json(result: Any, chosen: bool) -> dict[str, Any]:
    estimate = result.estimate
    return {
        "setting": result.setting.name,
        "device_bytes": _plain_names(estimate.device_bytes),
        "host_bytes": _plain_names(estimate.offloaded_bytes("host")),
        "disk_bytes": _plain_names(estimate.offloaded_bytes("disk")),
        "device_total_bytes": estimate.device_total_bytes,
        "host_total_bytes": estimate.host_total_bytes,
        "flops": estimate.flops,
        "cpu_update_thread_s": estimate.cpu_update_s,
        "fits": result.fits,
        "chosen": chosen,
    }


def _plain_names(sizes: dict[str, int]) -> dict[str, int]:
    return {plain_class(name).replace(" ", "_"): size for name, size in sizes.items()}


def _print_table(results: list[Any], best: Any, traced: bool, gpu_bytes: int | None) -> None:
    """Prints a table of at most 80 columns, in which a setting's name has a line of its own."""
    largest = max(result.estimate.device_total_bytes for result in results)
    unit, unit_name = (GIB, "GiB") if largest >= GIB // 10 else (MIB, "MiB")
    print(f"{unit_name} on each rank; host: of its node's memory\n")
    names = (*COLUMNS, "total", "host")
    widths = [max(len(name), 10) + 1 for name in names]
    print("".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
    for result in results:
        estimate = result.estimate
        sizes = [
            sum(estimate.device_bytes.get(name, 0) for name in names) for names in COLUMNS.values()
        ]
        sizes += [estimate.device_total_bytes, estimate.host_total_bytes]
        note = {True: "fits", False: "too big", None: ""}[result.fits]
        print(result.setting.name + (": " if note else "") + note)
        cells = zip(sizes, widths, strict=True)
        print("".join(f"{size / unit:{width}.2f}" for size, width in cells))
    print()
    for line in _remarks(results, best, traced, gpu_bytes):
        print(textwrap.fill(line, 80))


def _remarks(results: list[Any], best: Any, traced: bool, gpu_bytes: int | None) -> Iterator[str]:
    if not traced:
        yield "Activations are not included: they need --batch."
    offloaded = results if gpu_bytes is None else [best] if best else []
    thread_s = max((result.estimate.cpu_update_s for result in offloaded), default=0.0)
    if thread_s >= 1e-3:
        yield (
            f"An optimizer on the CPU takes about {thread_s:.2g} s a step on one thread of each "
            f"rank, {thread_s / 12:.2g} s on 12: leave workers.cpus unset, or set it to the node's "
            "CPUs / its GPUs."
        )
    if gpu_bytes is None:
        return
    if best is not None:
        yield f"Use {best.setting.name}: the first that fits in {format_size(gpu_bytes)}."
        return
    least = min(results, key=lambda result: int(result.estimate.device_total_bytes))
    needed, usable = least.estimate.device_total_bytes, int(USABLE_FRACTION * gpu_bytes)
    yield (
        f"Nothing fits in {format_size(gpu_bytes)}, of which {format_size(usable)} are for the "
        "model (the rest is left to CUDA, NCCL and fragmentation): the least, "
        f"{least.setting.name}, needs {format_size(needed)}, {format_size(needed - usable)} "
        "too much."
    )
    activations = least.estimate.device_bytes.get("activations", 0)
    if 2 * activations > needed:
        yield (
            f"Most of it, {format_size(activations)}, are activations: set a smaller "
            "train_micro_batch_size_per_gpu (more gradient_accumulation_steps keep the batch), or "
            "shorten the sequences that --batch makes."
        )
    else:
        yield (
            f"Most of it, {format_size(needed - activations)}, are weights, gradients and their "
            "buffers: use more ranks (--world), of which each holds less at stage 3, a dtype of 16 "
            "bits (bf16 in --engine), or GPUs with more memory."
        )
