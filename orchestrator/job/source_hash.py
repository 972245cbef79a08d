"""Hashes the source of a job's function, to tell whether it has changed between two runs."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rayzero.orchestrator.job.entrypoint_check import source_in
from rayzero.orchestrator.spec import JobSpec


def hash_source(spec: JobSpec, folder: str, function: Callable[[Any], Any] | None = None) -> str:
    """The hash of the file of the function or script, or of a given function's own source; empty
    if there is none. Comments and formatting do not count; what it imports does not either.

    Args:
        folder: where the workers import from first.
    """
    with suppress(OSError, TypeError, SyntaxError, ValueError, RecursionError):
        if function is not None:
            return _hash(textwrap.dedent(inspect.getsource(function)))
        if spec.launch is not None and spec.launch.script:
            return _hash(Path(folder, spec.launch.script).read_bytes())
        module = spec.launch.module if spec.launch is not None else spec.entrypoint
        path = source_in(folder, str(module).partition(":")[0])
        return "" if path is None else _hash(path.read_bytes())
    return ""


def _hash(source: str | bytes) -> str:
    """Python's versions have different syntax trees."""
    tree = f"{sys.version_info[:2]}{ast.dump(ast.parse(source))}"
    return hashlib.sha256(tree.encode()).hexdigest()[:16]
