"""A real Chromium without a window, over its debugging pipe: no socket, no driver, no package."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if (path := shutil.which(name))
    ),
    None,
)
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-default-apps", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--mute-audio", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium reads its orders from 3 and answers on 4, wherever the pipes are in this process.
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page of a browser that ends with the `with` block.

    problems: what the page said to the console as an error, and what it threw.
    requests: every address that it requested.
    """

    def __init__(self, folder: Path) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._number, self._answers, self._buffer, self._session = 0, {}, b"", None
        self._events: list[str] = []
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        words = [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), *words],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(x["targetId"] for x in targets if x["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for name in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{name}.enable")
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=1280, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def ask(self, method: str, **parameters: object) -> dict:
        """Send one order and wait for its answer."""
        self._number += 1
        order = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._out, json.dumps(order).encode() + b"\0")
        self._until(lambda: self._number in self._answers, method)
        answer = self._answers.pop(self._number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _until(self, condition, what: str) -> None:
        end = time.monotonic() + 60
        while not condition():
            seconds_left = end - time.monotonic()
            assert seconds_left > 0 and select.select([self._in], [], [], seconds_left)[0], (
                f"{what}: no answer"
            )
            data = os.read(self._in, 1 << 20)
            assert data, f"{what}: the browser ended"
            *whole, self._buffer = (self._buffer + data).split(b"\0")
            for text in whole:
                self._take(json.loads(text))

    def _take(self, message: dict) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        method, details = message["method"], message.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(details["exceptionDetails"])[:600])
        if method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
            self.problems.append(json.dumps(details["args"])[:600])
        if method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.problems.append(details["entry"]["text"])
        if method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])

    def open(self, path: Path, hash: str = "") -> float:
        """Open a file; returns after how many seconds it was there."""
        self._events.clear()
        start = time.monotonic()
        # A new hash alone would load nothing.
        self.ask("Page.navigate", url="about:blank")
        self._until(lambda: "Page.loadEventFired" in self._events, "about:blank")
        self._events.clear()
        self.ask("Page.navigate", url=path.resolve().as_uri() + hash)
        self._until(lambda: "Page.loadEventFired" in self._events, str(path))
        return time.monotonic() - start

    def run(self, script: str) -> object:
        """The value of an expression in the page."""
        answer = self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of the first element that a selector finds."""
        script = (
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getClientRects()[0];"
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        x, y = self.run(script)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key, by its name in the browser."""
        text = {"text": key} if len(key) == 1 else {}
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27}
        common = {"key": key, "code": key, "modifiers": 8 if shift else 0}
        common["windowsVirtualKeyCode"] = codes.get(key, 0)
        self.ask("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **common)

    def prefer(self, scheme: str) -> None:
        """Say that the reader prefers `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.ask("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
