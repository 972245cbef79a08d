"""A headless Chromium, controlled by the DevTools protocol over pipes."""

from __future__ import annotations

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

_RESPONSE_TIMEOUT_S = 30.0
_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find_browser() -> str:
    """Path of the browser; skips the test if none is installed."""
    path = os.environ.get("RAYZERO_CHROMIUM") or next(
        filter(None, map(shutil.which, _PROGRAMS)), None
    )
    if not path:
        pytest.skip(f"no {' or '.join(_PROGRAMS)} on PATH, and RAYZERO_CHROMIUM names none")
    return path


class Browser:
    """A tab. `errors` has the exceptions and logged errors of its page."""

    def __init__(self, request_fd: int, response_fd: int) -> None:
        self._request_fd = request_fd
        self._response_fd = response_fd
        self._buffer = b""
        self._request_id = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._request_id += 1
        request: dict[str, Any] = {"id": self._request_id, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._request_fd, json.dumps(request).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._request_id:
                assert "error" not in message, message
                return dict(message["result"])
            self._handle_event(message)

    def set_viewport(self, width: int, height: int, dark: bool) -> None:
        """Set the window size in pixels and the preferred color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
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
        """Wait until a script's result is true."""
        deadline_s = monotonic() + timeout_s
        while not self.evaluate(script):
            assert monotonic() < deadline_s, f"never true: {script}"
            sleep(0.05)

    def press_key(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=9
            )

    def screenshot_size(self) -> int:
        """Characters of an image of the whole page."""
        return len(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def _read(self) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._response_fd, selectors.EVENT_READ)
            while b"\0" not in self._buffer:
                assert selector.select(_RESPONSE_TIMEOUT_S), "the browser does not respond"
                data = os.read(self._response_fd, 1 << 20)
                assert data, "the browser has exited"
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(line))

    def _handle_event(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            self.errors.append(event["params"]["entry"]["text"])


@contextmanager
def start_browser(folder: Path) -> Iterator[Browser]:
    """Run a browser with its profile in a folder."""
    request_read_fd, request_fd = os.pipe()
    response_fd, response_write_fd = os.pipe()
    # The browser reads requests from descriptor 3 and writes responses to 4.
    command = f'exec "$0" "$@" 3<&{request_read_fd} 4>&{response_write_fd}'
    flags = [
        *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
        *("--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars", "--lang=en-US"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        "--disable-quic",
        f"--user-data-dir={folder}",
    ]
    process = subprocess.Popen(
        ["bash", "-c", command, find_browser(), *flags],
        pass_fds=(request_read_fd, response_write_fd),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(request_read_fd)
    os.close(response_write_fd)
    try:
        yield Browser(request_fd, response_fd)
    finally:
        with suppress(OSError):
            os.close(request_fd)
        process.kill()
        process.wait(10)
        os.close(response_fd)


def check_layout(tab: Browser, width: int) -> None:
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(OVERFLOWING) == []
    assert tab.evaluate(LOW_CONTRAST) == []


TEXT = "(document.body?.innerText ?? '')"


SIZES = {"phone": (390, 844), "desktop": (1440, 900)}


OVERFLOWING = """
[...document.querySelectorAll('section, section *')].filter((element) => {
  const scrolls = element.closest('.scroll');
  const box = element.getBoundingClientRect();
  return !scrolls && box.width > 0 && box.right > document.documentElement.clientWidth + 1;
}).map((element) => element.outerHTML.slice(0, 200))
"""


LOW_CONTRAST = """
(() => {
  const luminance = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    if (parts.length > 3 && parts[3] === 0) return null;
    const [r, g, b] = parts.slice(0, 3).map((value) => {
      value /= 255;
      return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (element) => {
    for (; element; element = element.parentElement) {
      const value = luminance(getComputedStyle(element).backgroundColor);
      if (value !== null) return value;
    }
    return 1;
  };
  const low = [];
  for (const element of document.querySelectorAll('body *')) {
    const hasText = [...element.childNodes].some(
      (node) => node.nodeType === 3 && node.data.trim());
    if (!hasText || element.closest('script, style, svg, .skip, [hidden]')) continue;
    const [a, b] = [luminance(getComputedStyle(element).color), background(element)]
      .sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(element.outerHTML.slice(0, 120));
  }
  return low;
})()
"""
