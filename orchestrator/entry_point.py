"""The entry point of a job or a role, as a job file names it."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_ENTRYPOINT = re.compile(r"[\w.]+:[\w.<>]+")
_FILE_ENTRYPOINT = re.compile(r"^(?:\./)?((?:\w+/)*\w+)\.py(?=:)")


def _check_entrypoint(value: str) -> str:
    """Returns the entry point, with a file replaced by its module."""
    value = _FILE_ENTRYPOINT.sub(lambda file: file[1].replace("/", "."), value)
    if not _ENTRYPOINT.fullmatch(value):
        path, _, function = value.partition(":")
        path, is_file = path.removesuffix(".py"), path.endswith(".py")
        if not function and not is_file:
            path, _, function = path.rpartition(".")
        near = f"{path.strip('./').replace('/', '.')}:{function or 'train'}"
        example = near if _ENTRYPOINT.fullmatch(near) else "examples.gpt.train:train"
        raise ValueError(f"must be module:function, such as {example}")
    return value


EntryPoint = Annotated[str, AfterValidator(_check_entrypoint)]
