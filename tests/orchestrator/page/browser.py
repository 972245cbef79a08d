"""A headless Chromium, driven through the pipe that it takes its orders from."""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

_ANSWER_S = 30.0
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def program() -> str:
    """Where the browser is; skips the test where there is none."""
    found = os.environ.get("RAYZERO_CHROMIUM") or next(
        filter(None, map(shutil.which, _NAMES)), None
    )
    if not found:
        pytest.skip(f"no {' or '.join(_NAMES)} on PATH, and RAYZERO_CHROMIUM names none")
    return found


class Browser:
    """One tab. `errors` are the exceptions and refusals of its page."""

    def __init__(self, orders: int, answers: int) -> None:
        self._orders = orders
        self._answers = answers
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        order: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    def look(self, width: int, height: int, dark: bool) -> None:
        """The size of the window, in its own pixels, and the colours that the user prefers."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        value = "dark" if dark else "light"
        preference = {"name": "prefers-color-scheme", "value": value}
        self.call("Emulation.setEmulatedMedia", features=[preference])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 15.0) -> None:
        """Until it is true of the page."""
        until = monotonic() + timeout_s
        while not self.evaluate(script):
            assert monotonic() < until, f"never true: {script}"
            sleep(0.05)

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=9
            )

    def picture(self, path: Path) -> None:
        """The whole page, also what is to be scrolled to."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _read(self) -> dict[str, Any]:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._answers, selectors.EVENT_READ)
            while b"\0" not in self._rest:
                assert waiting.select(_ANSWER_S), "the browser does not answer"
                got = os.read(self._answers, 1 << 20)
                assert got, "the browser is gone"
                self._rest += got
        line, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            self.errors.append(event["params"]["entry"]["text"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in that folder; killed at the end."""
    orders_in, orders = os.pipe()
    answers, answers_out = os.pipe()
    # The shell gives the pipes the numbers that the browser looks for them at.
    command = f'exec "$0" "$@" 3<&{orders_in} 4>&{answers_out}'
    flags = ("--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu")
    more = ("--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars", "--lang=en-US")
    process = subprocess.Popen(
        ["bash", "-c", command, program(), *flags, *more, f"--user-data-dir={folder}"],
        pass_fds=(orders_in, answers_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(orders_in)
    os.close(answers_out)
    try:
        yield Browser(orders, answers)
    finally:
        with suppress(OSError):
            os.close(orders)
        process.kill()
        process.wait(10)
        os.close(answers)
