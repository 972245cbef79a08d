"""`run_script`: the training function of a job with `launch:`, which runs a script as `__main__`.

The script gets the worker's process group instead of one of its own, and `import deepspeed` is
rayzero's. It runs once in a process.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rayzero.engine.device import get_device
from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.engine.session import current_session
from rayzero.workers.context import Context
from rayzero.workers.entrypoint import EntryPointError
from rayzero.workers.launch.accelerated import patch_accelerator
from rayzero.workers.launch.own_loader import following_own_loaders
from rayzero.workers.launch.process import own_process_group, script_end
from rayzero.workers.launch.scripted_steps import patch_partial_state
from rayzero.workers.launch.trainer import patch_trainer
from rayzero.workers.launch.tries import ScriptSettings, TryEndedError
from rayzero.workers.session import JobSession

_PRELOADED = frozenset({"transformers", "accelerate", "peft", "trl", "lightning", "deepspeed"})
"""Imported before a worker joins its first generation, where it would make its peers wait."""
log = logging.getLogger("rayzero.workers")
_FIX = "`rayzero launch SCRIPT`, or `launch:` in the job file"


class ScriptExitError(RayzeroError):
    """The script called `sys.exit` with a code other than 0."""


def run_script(ctx: Context) -> dict[str, Any] | None:
    """Runs the script once, to its end. Returns what a try has measured; None of any other run.

    Args:
        ctx: `args` are the fields of `launch:`, see `LaunchSpec`.

    Raises:
        EntryPointError: there is no such script or module; or its arguments are wrong.
        ScriptExitError: it called `sys.exit(n)`.
    """
    session = current_session()
    if not isinstance(session, JobSession):
        raise EntryPointError("a script can only be launched in a job", fix=_FIX)
    _apply_settings(ctx.args, session)
    session.script_settings = ScriptSettings(
        ctx.args["overrides"], ctx.args["timed_steps"], get_device(ctx.device), ctx.world_size
    )
    _import_deepspeed()
    _tell_start(ctx, session)
    target = ctx.args["module"] or ctx.args["script"]
    with (
        own_process_group(),
        following_own_loaders(session),
        _keeping_files(session),
        _program(ctx.args, target),
        script_end(),
    ):
        try:
            _execute(ctx.args, target)
        except SystemExit as exited:
            _check_exit(exited, target)
        except TryEndedError as ended:
            return ended.result
    return None


def preload(args: dict[str, Any]) -> None:
    """Imports what the script imports of large libraries at its top, in a process that waits for
    its first generation. Errors are left to the script."""
    if args.get("script") is None:
        return
    _import_deepspeed()
    with suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse(Path(args["script"]).read_text())
        wanted = [node for node in tree.body if _imported_package(node) in _PRELOADED]
        for node in wanted:
            with suppress(Exception):
                code = compile(ast.Module([node], []), args["script"], "exec")
                exec(code, {"__name__": "rayzero.preload"})


def _imported_package(node: ast.stmt) -> str:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] if not node.level else ""
    return node.names[0].name.partition(".")[0] if isinstance(node, ast.Import) else ""


def _import_deepspeed() -> None:
    from importlib import import_module  # rayzero.deepspeed is not below this layer

    import_module("rayzero.deepspeed.install").install()
    patch_libraries()


def _apply_settings(args: dict[str, Any], session: JobSession) -> None:
    """The stage and the config of the command line, where `initialize` and Accelerate look for
    them if the script names none. Accelerate, and Trainer over it, train at stage 0 without any."""
    stage, file = args["stage"], args["deepspeed_config"]
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ.pop("ACCELERATE_USE_CPU", None)  # they would use DDP; the device is the worker's
    os.environ.setdefault("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true")
    if stage is None and file is None:
        os.environ.setdefault("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")
        return
    config: dict[str, Any] = {}
    if file is not None:
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = file
        try:
            config = json.loads(Path(file).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"--deepspeed_config {file}: {error}", "a JSON file") from None
    if stage is not None:
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(stage)
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


@contextmanager
def _keeping_files(session: JobSession) -> Iterator[None]:
    """Within it, `torch.save` leaves the files of finished epochs as they are: a script that is
    run again comes to those epochs with the weights of a later step."""
    save = torch.save

    @wraps(save)
    def saving(obj: object, f: Any, *args: Any, **options: Any) -> None:
        engine = session.engine
        is_late = engine is not None and bool(engine.progress.script_lag)
        if is_late and isinstance(f, str | os.PathLike) and os.path.exists(f):
            log.warning("torch.save: %s of an epoch that is finished is not written again", f)
            return
        save(obj, f, *args, **options)

    torch.save = saving
    try:
        yield
    finally:
        torch.save = save


@contextmanager
def _program(args: dict[str, Any], target: str) -> Iterator[None]:
    """`sys.argv` and `sys.path` as python itself would set them for the script."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [target, *args["args"]]
    first = os.getcwd() if args["module"] else str(Path(target).resolve().parent)
    sys.path.insert(0, first)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


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
    """Whether runpy itself raised it: it found no such module."""
    return traceback.extract_tb(error.__traceback__)[-1].filename == "<frozen runpy>"


def _check_exit(exited: SystemExit, target: str) -> None:
    """Returns for an exit of success. Raises what the exit says, with its place."""
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


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.accelerator": patch_accelerator,
    "accelerate.state": patch_partial_state,
    "transformers.trainer": patch_trainer,
}


def patch_libraries() -> None:
    """Patches each module of the table once: now if it is imported, else after its import."""
    if any(isinstance(finder, _PatchingFinder) for finder in sys.meta_path):
        return
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _PatchingFinder())


class _PatchingFinder(MetaPathFinder):
    """Finds what the others find, and patches it when it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _PATCHES:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _PATCHES[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
