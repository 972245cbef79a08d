"""From an exception in the training thread to the message that tells the user about it."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

from rayzero.engine.errors import CollectiveError, ConfigError, DataError
from rayzero.workers.entrypoint import EntryPointError
from rayzero.workers.keeper import StateError
from rayzero.workers.messages import Crashed, CrashKind
from rayzero.workers.process_group import is_collective_failure
from rayzero.workers.vault.errors import VaultMemoryError

_OURS = Path(__file__).resolve().parent


def crashed(error: BaseException, generation: int, rank: int, step: int) -> Crashed:
    """Describes `error`; the traceback begins at the user's first frame."""
    kind = _kind(error)
    shown: BaseException | None = error if kind in ("user", "collective") else None
    if kind == "entrypoint":
        shown = error.__cause__
    text = str(error) if kind in ("config", "entrypoint", "data", "state") else _headline(error)
    return Crashed(generation, rank, kind, step, text, user_traceback(shown) if shown else "")


def user_traceback(error: BaseException) -> str:
    """The traceback of `error`, as Python prints it, from the user's first frame on."""
    told = traceback.TracebackException(type(error), error, _from_user(error.__traceback__))
    return "".join(told.format()).rstrip()


def _kind(error: BaseException) -> CrashKind:
    if isinstance(error, EntryPointError):
        return "entrypoint"
    if isinstance(error, StateError):
        return "state"
    if isinstance(error, ConfigError | VaultMemoryError):
        return "config"
    if isinstance(error, DataError):
        return "data"
    # User code that wraps a failed collective does not change what it is.
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, CollectiveError) or is_collective_failure(chain):
            return "collective"
        chain = chain.__cause__ or chain.__context__
    return "user"


def _headline(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the training function called sys.exit({error.code!r})"
    return "".join(traceback.format_exception_only(error)).strip()


def _from_user(frames: TracebackType | None) -> TracebackType | None:
    """Skips the frames of this package and of the import system that lead to the user's code."""
    first = frames
    while first is not None:
        file = first.tb_frame.f_code.co_filename
        ours = not file.startswith("<") and _OURS in Path(file).resolve().parents
        importing = file.startswith("<frozen importlib") or file.endswith("importlib/__init__.py")
        if not (ours or importing):
            return first
        first = first.tb_next
    return frames  # none of it is the user's: show what there is
