"""`rayzero launch`: run a training script as a job."""

from __future__ import annotations

import ast
import json
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cli.command import (
    JsonLinesFlag,
    RestartFlag,
    SpecOverrides,
    StartAddress,
    cluster_command,
    new_group,
    spec_overrides,
)

if TYPE_CHECKING:
    from rayzero.orchestrator.job.tuning import Tuned
    from rayzero.orchestrator.spec import JobSpec

commands = new_group()

AutotuningMode: TypeAlias = Annotated[
    Literal["tune", "run"] | None,
    typer.Option(
        help="Choose stage and micro-batch by short runs, as `autotuning` in the config says. "
        "`run` then trains with the best settings.",
    ),
]
_IGNORED = "Accepted for compatibility with deepspeed's command line, and ignored: "


@commands.command(
    epilog="Example: rayzero launch --workers 2:8 --stage 3 train.py --epochs 3",
    context_settings={"allow_interspersed_args": False},
)
@cluster_command
def launch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT.py [ARGS]", help="The script, and its own arguments."),
    ],
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for `python -m`.")
    ] = False,
    workers: Annotated[
        str | None, typer.Option(metavar="MIN[:MAX]", help="Number of workers. Default: 1.")
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(help="ZeRO stage (0 to 3), for scripts without a DeepSpeed config."),
    ] = None,
    deepspeed_config: Annotated[
        str | None,
        typer.Option(
            "--deepspeed_config",
            metavar="FILE",
            help="DeepSpeed config, for scripts without one.",
        ),
    ] = None,
    autotuning: AutotuningMode = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the job. Default: the script's.")
    ] = None,
    address: StartAddress = None,
    overrides: SpecOverrides = None,
    restart: RestartFlag = False,
    as_json: JsonLinesFlag = False,
    num_gpus: Annotated[
        int | None,
        typer.Option("--num_gpus", help="Same as --workers, with one GPU for each worker."),
    ] = None,
    num_nodes: Annotated[
        int | None, typer.Option("--num_nodes", help="Only 1: Ray places the workers.")
    ] = None,
    master_port: Annotated[
        int | None, typer.Option("--master_port", help=f"{_IGNORED}the job chooses a free one.")
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master_addr", help=f"{_IGNORED}the job knows its nodes.")
    ] = None,
) -> int:
    """Run a training script on every worker, and wait until it ends.

    The script runs as `__main__` with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
    `import deepspeed` is rayzero's engine. After a fault or a resize, training continues at the
    job's last step. Exit codes: those of `run`; 2 also for wrong arguments of the script.
    """
    target = {"module" if module else "script": command[0], "args": command[1:]}
    launched = target | {"stage": stage, "deepspeed_config": deepspeed_config}
    document = {"launch": launched, "name": name or _name_of(command[0])}
    unused = {"--master_port": master_port, "--master_addr": master_addr}
    limits = _workers_of(workers, num_gpus, num_nodes, unused)
    changes = spec_overrides(overrides, restart)
    return _run(lambda: _make_spec(document, limits, changes), autotuning, address, as_json)


def _run(
    make_spec: Callable[[], JobSpec],
    autotuning: str | None,
    address: str | None,
    as_json: bool,
) -> int:
    """Runs the job, after tuning with the best settings. Returns the exit code."""
    from rayzero.orchestrator.cli.run import run_with_console

    if autotuning is None:
        return run_with_console(make_spec, address, as_json)
    from rayzero.orchestrator.job.stop_signals import StopSignals

    with StopSignals() as signals:
        try:
            best = tune_and_report(make_spec(), address, as_json)
        except (KeyboardInterrupt, SystemExit):  # SystemExit after Ray has replaced the handler
            return signals.exit_code or 128 + signal.SIGTERM
    if best is None or autotuning == "tune":
        return int(best is None)
    return run_with_console(lambda: best, address, as_json)


def _workers_of(
    workers: str | None, num_gpus: int | None, num_nodes: int | None, unused: dict[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """Returns the number of workers, and the resources of each, from our and deepspeed's flags."""
    if num_nodes not in (None, 1):
        raise ConfigError(
            f"--num_nodes {num_nodes}: Ray decides where workers run",
            fix="use --workers, with the number of workers on all nodes together",
        )
    for flag, value in unused.items():
        if value is not None:
            print(f"{flag} {value} is not used: the job chooses its own", file=sys.stderr)
    if num_gpus is None:
        return workers, {}
    if workers is not None:
        raise ConfigError(
            "--num_gpus and --workers are both given", fix="use --workers, and --set workers.gpus=1"
        )
    return str(num_gpus), {"gpus": 1}


def _make_spec(
    document: dict[str, Any], limits: tuple[str | None, dict[str, Any]], overrides: list[str]
) -> JobSpec:
    from rayzero.orchestrator.job_file import make_spec, parse_worker_limits

    launched = document["launch"]
    for key in ("script", "deepspeed_config"):
        file = launched.get(key)
        if file is not None and not Path(file).exists():
            raise ConfigError(
                f"there is no file {file!r}", "a path from here", f"change {key} of launch"
            )
    if launched.get("script") is not None:
        _check_syntax(launched["script"])
    number, resources = limits
    if number is not None:
        least, most = parse_worker_limits(number)
        document["workers"] = {**resources, "min": least, "max": most}
    return make_spec(document, "rayzero launch", Path(), overrides)


def _check_syntax(script: str) -> None:
    """Raises ConfigError at a syntax error, before a cluster or a worker starts."""
    from rayzero.orchestrator.job.entrypoint_check import syntax_problem

    try:
        ast.parse(Path(script).read_bytes(), script)
        return
    except OSError as error:
        problem = f"{script!r} cannot be read: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        problem = syntax_problem(script, error)
    raise ConfigError(problem, "a script in Python", "`rayzero launch SCRIPT.py`")


def _name_of(target: str) -> str:
    """Returns a job's name from a script's path or a module's name."""
    stem = target.rpartition(".")[2] if not target.endswith(".py") else Path(target).stem
    if stem == "__main__":
        stem = Path(target).resolve().parent.name
    return re.sub(r"[^A-Za-z0-9._-]", "-", Path(stem).name).lstrip("._-")[:63] or "script"


def tune_and_report(spec: JobSpec, address: str | None, as_json: bool) -> JobSpec | None:
    """Tries the settings of a job and writes `results_dir`. Returns the job with the best ones;
    None if every try failed. Raises as `ScriptTuner.tune`."""
    from rayzero.orchestrator.cluster.connect import connect  # imports Ray, which takes a second
    from rayzero.orchestrator.job.tuning import ScriptTuner

    show = (lambda line: None) if as_json else partial(print, flush=True)
    cluster = connect(address)
    try:
        tuned = ScriptTuner(spec, cluster, show).tune()
    finally:
        cluster.close()
    table = _to_table(tuned)
    folder = Path(tuned.settings.results_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.txt").write_text(table, encoding="utf-8")
    if as_json:
        for result in tuned.results:
            print(json.dumps({"type": "try", **asdict(result)}), flush=True)
    else:
        print(table, end="", flush=True)
    if tuned.best is None:
        print("every try failed: exps_dir has their logs", file=sys.stderr)
        return None
    config = folder / "ds_config_optimal.json"
    config.write_text(json.dumps(tuned.config, indent=2) + "\n", encoding="utf-8")
    command = _best_command(sys.argv[1:], spec, tuned.spec)
    (folder / "cmd_optimal.txt").write_text(f"{command}\n", encoding="utf-8")
    if not as_json:
        print(f"best: {tuned.best.candidate.name}; {config} has its config", flush=True)
    return tuned.spec


def _to_table(tuned: Tuned) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table("try", title=f"by {tuned.settings.metric}", title_justify="left")
    for name in ("batch", "samples/s", "s/step", "TFLOP/s", "GiB"):
        table.add_column(name, justify="right")
    table.add_column("")
    for result in tuned.results:
        numbers = (
            *(result.global_batch, result.samples_per_s, result.step_s),
            *(result.flops_per_s, result.peak_bytes),
        )
        scaled = zip(numbers, (1, 1, 1, 1e12, 2**30), strict=True)
        cells = [f"{number / unit:.4g}" if number else "" for number, unit in scaled]
        remark = "best" if result is tuned.best else result.failure
        table.add_row(result.candidate.name, *cells, remark)
    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _best_command(words: Sequence[str], spec: JobSpec, best: JobSpec) -> str:
    """Returns the command that was given, with the best settings in place of tuning."""
    if spec.launch is None or best.launch is None:
        return ""
    options = [*words[: len(words) - len(spec.launch.args)]]
    start = next(i for i, word in enumerate(options) if word.startswith("--autotuning"))
    overrides = json.dumps(best.launch.overrides)
    end = start + 2 if options[start] == "--autotuning" else start + 1  # with a value of its own
    options[start:end] = ["--set", f"launch.overrides={overrides}"]
    return shlex.join(["rayzero", *options, *best.launch.args])
