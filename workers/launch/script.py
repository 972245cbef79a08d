"""`run_script`: the training function of a job with `launch:`, which runs a script as `__main__`.

The script gets the worker's process group instead of one of its own, and `import deepspeed` imports
rayzero's adapter. A process runs one script, so the changes that are made for it are never undone.
"""

from __future__ import annotations

import ast
import atexit
import json
import logging
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rayzero.engine.device import get_device
from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.engine.patches import replace
from rayzero.engine.session import current_session
from rayzero.workers.context import Context
from rayzero.workers.entrypoint import EntryPointError
from rayzero.workers.launch.adapters import begin_script, install_adapters, preloaded
from rayzero.workers.launch.own_loader import follow_own_loaders
from rayzero.workers.launch.tries import ScriptSettings, TryEndedError
from rayzero.workers.session import JobSession

log = logging.getLogger("rayzero.workers")
_FIX = "`rayzero launch SCRIPT`, or `launch:` in the job file"


class ScriptExitError(RayzeroError):
    """The script called `sys.exit` with a code other than 0."""


def run_script(ctx: Context) -> dict[str, Any] | None:
    """Runs the script once, to its end.

    Args:
        ctx: `args` are the fields of `launch:`, see `LaunchSpec`.

    Returns:
        What a short run for the autotuner has measured; otherwise None.

    Raises:
        EntryPointError: there is no such script or module, or the script's arguments are wrong.
        ScriptExitError: the script called `sys.exit(n)`, with an n other than 0.
    """
    session = current_session()
    if not isinstance(session, JobSession):
        raise EntryPointError("a script can only be launched in a job", fix=_FIX)
    install_adapters(ctx.args["adapters"])
    begin_script(ctx.args)
    _set_engine_config(ctx.args, session)
    session.script_settings = ScriptSettings(
        ctx.args["overrides"], ctx.args["timed_steps"], get_device(ctx.device), ctx.world_size
    )
    _tell_start(ctx, session)
    follow_own_loaders(session)
    target = ctx.args["module"] or ctx.args["script"]
    _set_program(ctx.args, target)
    _lend_process_group()
    _keep_files(session)
    exits = _collect_exits()
    result = None
    try:
        _execute(ctx.args, target)
    except SystemExit as exited:
        _check_exit(exited, target)
    except TryEndedError as ended:
        result = ended.result
    for function in reversed(exits):
        with suppress(Exception):  # as at the end of a process, where it is only printed
            function()
    return result


def preload(args: dict[str, Any]) -> None:
    """Runs those top-level imports of the script that load large libraries, in a process that waits
    for its first generation. Errors are ignored: they occur again when the script runs."""
    if args.get("script") is None:
        return
    install_adapters(args["adapters"])
    with suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse(Path(args["script"]).read_text())
        wanted = [node for node in tree.body if _imported_package(node) in preloaded]
        for node in wanted:
            with suppress(Exception):
                code = compile(ast.Module([node], []), args["script"], "exec")
                exec(code, {"__name__": "rayzero.preload"})


def _imported_package(node: ast.stmt) -> str:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] if not node.level else ""
    return node.names[0].name.partition(".")[0] if isinstance(node, ast.Import) else ""


def _set_engine_config(args: dict[str, Any], session: JobSession) -> None:
    """Sets the config for an `initialize` without one, from the command line's stage and file."""
    stage, file = args["stage"], args["deepspeed_config"]
    if stage is None and file is None:
        return
    config: dict[str, Any] = {}
    if file is not None:
        try:
            config = json.loads(Path(file).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"--deepspeed_config {file}: {error}", "a JSON file") from None
    if stage is not None:
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
    session.engine_config = session.engine_config or config


def _tell_start(ctx: Context, session: JobSession) -> None:
    if ctx.is_main and session.is_resumed:
        print(
            "rayzero: the script begins in a job that has finished steps. `initialize`, "
            "Trainer and Accelerator.prepare continue there, and so do DataLoaders; a script that "
            "asks for its place itself skips what engine.global_steps says, or loads its own "
            "checkpoint with a client state, to whose step the job then goes back",
            flush=True,
        )


def _set_program(args: dict[str, Any], target: str) -> None:
    """Sets `sys.argv` and `sys.path` as Python does for a script."""
    sys.argv = [target, *args["args"]]
    sys.path.insert(0, os.getcwd() if args["module"] else str(Path(target).resolve().parent))


def _lend_process_group() -> None:
    """Makes `init_process_group` keep the worker's default group, and `destroy_process_group` end
    only groups that the script has made."""
    end = c10d.destroy_process_group

    def init_process_group(*args: Any, **options: Any) -> None:
        """Does nothing: the worker's group exists."""

    def destroy_process_group(group: Any = None) -> None:
        if group not in (None, dist.group.WORLD):
            end(group)

    homes: tuple[Any, ...] = (dist, c10d)
    for home in homes:
        replace(home, "init_process_group", init_process_group)
        replace(home, "destroy_process_group", destroy_process_group)


def _keep_files(session: JobSession) -> None:
    """Makes `torch.save` keep the existing files of finished epochs. The script of a new worker
    reaches those epochs with the weights of a later step."""
    save = torch.save

    @wraps(save)
    def saving(obj: object, f: Any, *args: Any, **options: Any) -> None:
        engine = session.engine
        is_late = engine is not None and bool(engine.progress.script_lag)
        if is_late and isinstance(f, str | os.PathLike) and os.path.exists(f):
            log.warning("torch.save: %s of an epoch that is finished is not written again", f)
            return
        save(obj, f, *args, **options)

    replace(torch, "save", saving)


def _collect_exits() -> list[Callable[[], object]]:
    """Collects the functions that the script registers with `atexit` from now on, to be called at
    the script's end: the worker's process is later killed. Functions that a module registers while
    it is imported are left to Python."""
    register = atexit.register
    exits: list[Callable[[], object]] = []

    def collecting(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not _is_called_by_script(sys._getframe(1)):
            return register(function, *args, **options)
        exits.append(lambda: function(*args, **options))
        return function

    replace(atexit, "register", collecting)
    return exits


def _is_called_by_script(frame: FrameType | None) -> bool:
    """Returns whether the frame was called by the script, directly or not, without an import in
    between."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        if frame.f_globals.get("__name__") == "__main__":
            return True
        frame = frame.f_back
    return False


def _execute(args: dict[str, Any], target: str) -> None:
    if args["module"]:
        try:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        except ImportError as error:
            if error.__traceback__ is None or not _is_runpys(error):
                raise
            raise EntryPointError(f"-m {target}: {error}", "a module", _FIX) from None
        return
    if not Path(target).exists():
        raise EntryPointError(
            f"there is no script {target} in {os.getcwd()} on this node",
            allowed="a file that is on every node, at the same path",
            fix=_FIX,
        )
    path = str(Path(target).resolve())  # as python's `__file__`
    try:
        runpy.run_path(path, run_name="__main__")
    except SyntaxError as error:
        if error.filename != path:
            raise
        raise EntryPointError(f"{path}:{error.lineno}: {error.msg}", "Python", target) from None


def _is_runpys(error: BaseException) -> bool:
    """Returns whether runpy itself raised the error, because it found no such module."""
    return traceback.extract_tb(error.__traceback__)[-1].filename == "<frozen runpy>"


def _check_exit(exited: SystemExit, target: str) -> None:
    """Checks a `sys.exit` of the script.

    Raises:
        EntryPointError: argparse ended the script, because its arguments are wrong.
        ScriptExitError: the exit code is not 0. The text names the line that called `sys.exit`.
    """
    if exited.code in (None, 0):
        return
    frames = traceback.extract_tb(exited.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(("<frozen", sys.prefix))]
    own = [frame for frame in users if "/argparse.py" not in frame.filename]
    own = [frame for frame in own if Path(frame.filename).parent != Path(__file__).parent]
    place = f" at {own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""
    if any(frame.filename.endswith("/argparse.py") for frame in frames):
        seen = exited.__context__ or "see its usage above"
        raise EntryPointError(f"{target}: wrong arguments ({seen}){place}", fix=_FIX) from None
    error = ScriptExitError(f"{target} called sys.exit({exited.code!r}){place}")
    raise error.with_traceback(exited.__traceback__) from None
