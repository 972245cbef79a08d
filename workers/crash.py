"""Describes the exception that ended a training function: its kind, its text, the user's frames."""

from __future__ import annotations

import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from rayzero.engine.device import DeviceError, is_device_failure
from rayzero.engine.errors import (
    CollectiveError,
    ConfigError,
    DataError,
    RayzeroError,
    is_own_file,
)
from rayzero.workers.entrypoint import EntryPointError
from rayzero.workers.messages import Crashed, CrashKind
from rayzero.workers.process_group import is_collective_failure
from rayzero.workers.retained_state import StateError
from rayzero.workers.vault.records import VaultMemoryError

_WRITTEN_TO_EXPANDED = "more than one element of the written-to tensor"
_WRITE_OUTSIDE = (
    "a parameter at stage 3? Outside its block's forward each rank holds a part of it: write "
    "inside zero.GatheredParameters(parameters, modifier_rank=0)"
)
_PACKAGE_FOLDER = Path(__file__).resolve().parent


def describe_crash(error: BaseException, generation: int, rank: int, step: int) -> Crashed:
    """Returns the message for an exception, with a traceback from the user's first frame on."""
    try:
        return _describe_crash(error, generation, rank, step)
    except Exception as failure:  # noqa: BLE001  # a user's exception can fail in any way
        text = f"{type(error).__name__}, which cannot be described: {type(failure).__name__}"
        return Crashed(generation, rank, "user", step, text, "")


def _describe_crash(error: BaseException, generation: int, rank: int, step: int) -> Crashed:
    kind = _crash_kind(error)
    text = str(error) if kind in ("config", "entrypoint", "data", "state") else summarize(error)
    cause: BaseException | None = error if kind in ("user", "device", "collective") else None
    if kind == "entrypoint":
        cause = error.__cause__
    return Crashed(generation, rank, kind, step, text, user_traceback(cause) if cause else "")


def user_traceback(error: BaseException) -> str:
    """Returns the formatted traceback of `error` from the user's first frame on, without frames of
    rayzero. These stay if rayzero's code raised another error than a `RayzeroError`. The traceback
    of a `RayzeroError` ends with the user's line, because its text is reported already."""
    shown = traceback.TracebackException(
        type(error), error, _skip_framework_frames(error.__traceback__)
    )
    part: traceback.TracebackException | None = shown
    for exception in _chain(error):
        if part is None:
            break
        _leave_out_own_frames(part, exception)
        part = part.__cause__ or part.__context__
    lines = list(shown.format())
    if isinstance(error, RayzeroError):
        lines = lines[: -len(list(shown.format_exception_only()))]
    return "".join(lines).rstrip()


def _leave_out_own_frames(shown: traceback.TracebackException, error: BaseException) -> None:
    users = [frame for frame in shown.stack if not is_own_file(frame.filename)]
    is_meant = isinstance(error, RayzeroError) or shown.stack[-1:] == users[-1:]
    if users and is_meant:
        shown.stack = traceback.StackSummary.from_list(users)


def _crash_kind(error: BaseException) -> CrashKind:
    if isinstance(error, EntryPointError):
        return "entrypoint"
    if isinstance(error, StateError):
        return "state"
    if isinstance(error, ConfigError | VaultMemoryError):
        return "config"
    if isinstance(error, DataError):
        return "data"
    # The causes are searched too, since user code may have wrapped the exception.
    if has_device_failed(error):
        return "device"
    if any(isinstance(e, CollectiveError) or is_collective_failure(e) for e in _chain(error)):
        return "collective"
    return "user"


def has_device_failed(error: BaseException) -> bool:
    """Returns whether the exception, or one of its causes, says that the device is unusable."""
    with suppress(Exception):  # a user's exception can fail in any way
        return any(isinstance(e, DeviceError) or is_device_failure(e) for e in _chain(error))
    return False


def _chain(error: BaseException) -> list[BaseException]:
    """Returns the exception, its cause or context, the cause or context of that, and so on."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) and before not in chain:
        chain.append(before)
    return chain


def summarize(error: BaseException) -> str:
    """Returns the exception's type and text, and an explanation where torch's text lacks it."""
    if isinstance(error, SystemExit):
        return f"the training function called sys.exit({error.code!r})"
    text = "".join(traceback.format_exception_only(error)).strip()
    return f"{text}\n  {_WRITE_OUTSIDE}" if _WRITTEN_TO_EXPANDED in text else text


def _skip_framework_frames(frames: TracebackType | None) -> TracebackType | None:
    """Skips the leading frames of this package and of the import system."""
    first = frames
    while first is not None:
        file = first.tb_frame.f_code.co_filename
        ours = not file.startswith("<") and _PACKAGE_FOLDER in Path(file).resolve().parents
        importing = file.startswith(("<frozen importlib", "<frozen runpy")) or file.endswith(
            "importlib/__init__.py"
        )
        if not (ours or importing):
            return first
        first = first.tb_next
    return frames  # no user frame: show all
