"""A real browser, headless, driven over a pipe by its own protocol: no other program is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.commands import LIMIT

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


class Browser:
    """One page of a browser."""

    def __init__(self, to: int, back: int):
        self._to, self._back, self._rest, self._last = to, back, b"", 0
        self._session: str | None = None
        self.messages: list[str] = []
        """What stood on the console, and errors that nobody caught."""
        self.loads = 0
        """How often a page was loaded."""
        self._seen: list[str] = []  # other events
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._back, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        """Note an event that concerns the page."""
        method, found = event.get("method", ""), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.messages.append(str(found["args"]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(str(found["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.messages.append(found["entry"]["text"])
        elif method == "Page.loadEventFired":
            self.loads += 1
        elif method == "Network.requestWillBeSent":
            self._seen.append(found["request"]["url"])

    @property
    def requests(self) -> list[str]:
        """Return the requests of the page, other than for files and data."""
        self.run("0")
        return [url for url in self._seen if not url.startswith(("file:", "data:", "about:"))]

    def size(self, width: int, height: int = 900) -> None:
        """Give the window a size, for example that of a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def scheme(self, name: str) -> None:
        """Prefer "dark" or "light"."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, page: Path) -> None:
        """Open a page from the disk, and wait until it is loaded."""
        self.visit(page.absolute().as_uri())

    def visit(self, address: str) -> None:
        """Open a page, and wait until it is loaded."""
        before = self.loads
        self.call("Page.navigate", url=address)
        self.until(lambda: self.loads > before)

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition."""
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end, "the browser takes too long"
            time.sleep(0.02)
            self.run("0")  # which reads what has happened meanwhile

    def run(self, script: str) -> Any:
        """Return what a script returns."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Move the mouse to a place."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Click on a place."""
        self.point(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path) -> None:
        """Save the whole page as an image."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser that keeps its files in a folder; end it after the `with` block."""
    assert PROGRAM is not None
    here_in, to = os.pipe()
    back, here_out = os.pipe()

    def connect() -> None:  # the browser reads from 3 and writes to 4
        a, b = os.dup(here_in), os.dup(here_out)
        os.dup2(a, 3)
        os.dup2(b, 4)

    command = [PROGRAM, *FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=connect,
        close_fds=False,
    ) as process:
        os.close(here_in)
        os.close(here_out)
        try:
            yield Browser(to, back)
        finally:
            process.kill()
            os.close(to)
            os.close(back)
