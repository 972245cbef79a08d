"""TensorBoard event files, of TensorBoard's own messages and records, without torch.

The writers of TensorBoard and torch have a thread that ends with the first write that fails. A
file written here is complete after each call, and a write that raises can be repeated.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any


class EventFile:
    """A new file in a folder, which is created. Raises OSError, as `write` does."""

    def __init__(self, folder: Path, now_s: float) -> None:
        # Imported here: TensorBoard takes half a second, and few processes write such files.
        self._records = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        self._event = import_module("tensorboard.compat.proto.event_pb2").Event
        name = f"events.out.tfevents.{int(now_s):010d}.{socket.gethostname()}.{time.time_ns()}"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / name
        self.write([self._event(wall_time=now_s, file_version="brain.Event:2")])

    def scalars(self, at_s: float, step: int, values: Mapping[str, float]) -> Any:
        """An event with the values of a step by tag."""
        pairs = [{"tag": tag, "simple_value": value} for tag, value in values.items()]
        return self._event(wall_time=at_s, step=step, summary={"value": pairs})

    def restart(self, at_s: float, step: int) -> Any:
        """An event that voids the earlier ones from this step on."""
        return self._event(wall_time=at_s, step=step, session_log={"status": "START"})

    def write(self, events: Sequence[Any]) -> None:
        """Adds all of the events or none."""
        data = BytesIO()
        records = self._records(data)
        for event in events:
            records.write(event.SerializeToString())
        append_all(self._path, data.getvalue())


def append_all(path: Path, data: bytes) -> None:
    """Appends all of the data or nothing: a torn record would be the last that a reader sees."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(data)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise
