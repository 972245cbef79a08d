"""Shared by all commands: options, exit codes, and running in another cluster.

Every command is one function. Its signature declares the arguments. Its body imports what it needs,
so that `rayzero --help` does not import torch, ray or pydantic.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeAlias

import typer
from typer.models import ArgumentInfo

from rayzero.engine.errors import ConfigError, RayzeroError

P = ParamSpec("P")

JOBS_FOLDER = "runs"
"""The default of `checkpoint.path`."""

JobName: TypeAlias = Annotated[str, typer.Argument(help="Name of the job.", metavar="NAME")]
RoleName: TypeAlias = Annotated[
    str, typer.Option("--role", help="A role of the job, instead of its ranks.", metavar="ROLE")
]
JobFile: TypeAlias = Annotated[Path, typer.Argument(help="Job file (YAML).", metavar="JOB.yaml")]
_ADDRESS_HELP = (
    "host:port of a Ray cluster; from outside the cluster http://HOST:8265, the address of its "
    "dashboard. Default: $RAY_ADDRESS; otherwise "
)
ClusterAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(help=f"{_ADDRESS_HELP}every cluster whose head node runs on this machine."),
]
StartAddress: TypeAlias = Annotated[
    str | None, typer.Option(help=f"{_ADDRESS_HELP}a local Ray cluster is started.")
]
SpecOverrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the job file: steps=10, engine.bf16.enabled=true.",
    ),
]
RestartFlag: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--restart",
        "--from-scratch",
        help="Start from scratch. The files of the last run are set aside, in a folder NAME.1 or "
        "the next number (checkpoint.resume: scratch).",
    ),
]
JobsPath: TypeAlias = Annotated[
    str,
    typer.Option(
        "--path",
        help="checkpoint.path of the job file, a folder or a URL, for jobs that are not running.",
    ),
]
OptionalJobsPath: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--path",
        help="checkpoint.path of the job file, a folder or a URL, for jobs that are not running. "
        "Default: the cluster's record of the job; otherwise `runs`.",
    ),
]
JsonValueFlag: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON value on stdout.")
]
JsonLinesFlag: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON lines on stdout.")
]


def new_group(help_text: str | None = None, example: str | None = None) -> typer.Typer:
    return typer.Typer(
        help=help_text,
        epilog=None if example is None else f"Example: {example}",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )


def exit_code_of(error: RayzeroError) -> int:
    """Returns the exit code for an error: 2 for a mistake in the user's input, 1 for a failure."""
    return 2 if isinstance(error, ConfigError) else 1


def local_command(command: Callable[P, int | None]) -> Callable[P, None]:
    """Wraps a command so that it ends the process with the exit code that it returns (None: 0).

    A RayzeroError is printed on stderr; the exit code is then `exit_code_of`. For Ctrl-C it is 130.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs) or 0
        except RayzeroError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            code = exit_code_of(error)
        except KeyboardInterrupt:
            code = 130
        raise typer.Exit(code)

    run.__doc__ = _join_lines(command.__doc__ or "")
    return run


def _join_lines(text: str) -> str:
    """Joins the lines of each paragraph, because typer would break lines where the source does."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def cluster_command(command: Callable[P, int | None]) -> Callable[P, None]:
    """Wraps a command as `local_command` does. If `address`, or else RAY_ADDRESS, is the address of
    a dashboard, the command line runs in that cluster instead: by the cluster's command server, or
    as a Ray job with the folder of the job file (for `launch`, with the working directory).
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int | None:
        from rayzero.orchestrator.cluster import command_client
        from rayzero.orchestrator.cluster.addresses import (
            CLIENT_ADDRESS_VARIABLE,
            check_dashboard,
            named_address,
        )

        given: Any = kwargs.get("address")
        named = named_address(given)
        if not named.is_dashboard:
            is_served = command.__name__ in command_client.SERVED_COMMANDS
            if is_served and CLIENT_ADDRESS_VARIABLE in os.environ:
                from rayzero.orchestrator.job.command_server import start_command_server

                start_command_server()  # for the next command; this one is a Ray job
            return command(*args, **kwargs)
        check_dashboard(named)
        words = [command.__name__, *_command_line(command, kwargs)]
        paths = [value for value in kwargs.values() if isinstance(value, Path)]
        folder = paths[0].resolve().parent if paths else None
        folder = Path.cwd() if command.__name__ == "launch" else folder
        return command_client.run_remotely(named.text, words, partial(print, flush=True), folder)

    return local_command(run)


def spec_overrides(given: list[str] | None, restart: bool) -> list[str]:
    """Returns the values of `--set`, and the one that `--restart` stands for."""
    return [*(given or ()), "checkpoint.resume=scratch"] if restart else list(given or ())


def _command_line(command: Callable[..., object], values: dict[str, Any]) -> Iterator[str]:
    """Yields options, then arguments, that differ from their defaults, except `--address`."""
    arguments: list[str] = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        value = values[name]
        if name == "address" or value == parameter.default:
            continue
        (info,) = parameter.annotation.__metadata__
        items = value if isinstance(value, list) else [value]
        texts = [item.name if isinstance(item, Path) else str(item) for item in items]
        if isinstance(info, ArgumentInfo):
            arguments += texts
        else:
            # typer.Option's first argument is `default`, but in an annotation a name.
            names = [word for word in (info.default, *(info.param_decls or ())) if word is not ...]
            flag = (names or [f"--{name.replace('_', '-')}"])[0]
            if value is True:
                yield flag
            else:
                for text in texts:
                    yield from (flag, text)
    yield from arguments  # last, because a script's own arguments may look like options
