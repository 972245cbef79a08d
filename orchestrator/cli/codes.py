"""Exit codes of commands that do one thing and end."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.orchestrator.cli.texts import print_error

P = ParamSpec("P")


def with_exit_code(command: Callable[P, int]) -> Callable[P, int]:
    """Errors as text on stderr: 2 for what the user wrote, 1 for what was found."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except RayzeroError as error:
            print_error(error)
            return 2 if isinstance(error, ConfigError) else 1
        except KeyboardInterrupt:
            return 130

    return run
