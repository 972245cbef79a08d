"""Selects the files of a folder to upload with a command that runs in another cluster: code, not
its results.

On top of what Ray leaves out (`.git`, `.venv`, and what .gitignore and .rayignore name), we leave
out virtual environments of any name, jobs' checkpoints, and files that are too large to be code.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cluster.ray_api import visit_uploaded_files
from rayzero.orchestrator.journal.files import EVENTS_FILE, STATE_FILE

LIMIT_VARIABLE = "RAYZERO_UPLOAD_MAX_FILE_BYTES"
_DEFAULT_MAX_FILE_BYTES = 10 * 2**20
_SPECIAL = re.compile(r"([*?\[\]!#\\ ])")  # in a line of .gitignore
_SHOWN = 3


@dataclass(frozen=True)
class Upload:
    """The files of `folder` that are uploaded.

    Attributes:
        sizes: in bytes, of each file that is uploaded, by its path in the folder.
        left_out: why, by path; a folder stands for all that it contains.
    """

    folder: Path
    sizes: dict[str, int]
    left_out: dict[str, str]

    @property
    def runtime_env(self) -> dict[str, object]:
        """Ray's: patterns of .gitignore, each for one path."""
        patterns = ["/" + _SPECIAL.sub(r"\\\1", path) for path in self.left_out]
        return {"working_dir": str(self.folder), "excludes": patterns}

    def describe(self) -> list[str]:
        """A line for each reason to leave something out, with the first paths."""
        paths_by_reason: dict[str, list[str]] = {}
        for path, why in self.left_out.items():
            paths_by_reason.setdefault(why, []).append(path)
        return [
            f"not uploaded, as {why}: {', '.join(paths[:_SHOWN])}"
            + (f" and {len(paths) - _SHOWN} others" if len(paths) > _SHOWN else "")
            for why, paths in paths_by_reason.items()
        ]

    def too_large_error(self, address: str) -> ConfigError:
        """The error for a cluster that has rejected the size of the upload."""
        largest = sorted(self.sizes, key=lambda path: -self.sizes[path])[:_SHOWN]
        listed = ", ".join(f"{path} ({_megabytes(self.sizes[path])})" for path in largest)
        return ConfigError(
            f"the folder {self.folder} is too large for the cluster at {address}: "
            f"{len(self.sizes)} files of {_megabytes(sum(self.sizes.values()))}, "
            f"the largest of them {listed}",
            allowed="100 MB, compressed",
            fix="name what is not code in a .rayignore file (it is read like .gitignore), and "
            "read data from storage that the nodes can reach",
        )


def select_upload(folder: Path) -> Upload:
    """Walks through the folder. Raises ConfigError if the variable that sets the largest file is
    not a number."""
    folder, limit_bytes = folder.resolve(), _max_file_bytes()
    sizes: dict[str, int] = {}
    left_out: dict[str, str] = {}

    def is_left_out(path: Path) -> bool:
        why = _why_left_out(path, limit_bytes) if path != folder else ""
        if why:
            left_out[str(path.relative_to(folder))] = why
        return bool(why)

    def add(path: Path) -> None:
        if path.is_file():
            sizes[str(path.relative_to(folder))] = path.stat().st_size

    visit_uploaded_files(folder, is_left_out, add)
    return Upload(folder, sizes, dict(sorted(left_out.items())))


def _why_left_out(path: Path, limit_bytes: int) -> str:
    """Empty if it is uploaded."""
    if path.is_dir():
        if (path / "pyvenv.cfg").is_file():
            return "a virtual environment"
        if (path / STATE_FILE).is_file() and (path / EVENTS_FILE).is_file():
            return "checkpoints and journal of a job"
        if path == Path(tempfile.gettempdir()).resolve():  # Ray packs the upload there
            return "temporary files"
        return ""
    if path.is_file() and path.stat().st_size > limit_bytes:
        return (
            f"over {_megabytes(limit_bytes)} (the nodes should read data from storage that they "
            f"share; {LIMIT_VARIABLE} sets the limit)"
        )
    return ""


def _max_file_bytes() -> int:
    text = os.environ.get(LIMIT_VARIABLE, str(_DEFAULT_MAX_FILE_BYTES))
    if not text.isdecimal():
        raise ConfigError(f"{LIMIT_VARIABLE}={text}", allowed="a number of bytes")
    return int(text)


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
