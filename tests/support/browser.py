"""A headless Chromium, driven over its DevTools protocol (https://chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

TIMEOUT_S = 60


def chromium() -> str | None:
    """The browser's command, where there is one."""
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


class Page:
    """A tab. ``errors``: what its scripts complained of, and files that it could not have."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe, self._number, self._session = pipe, 0, None
        self.errors: list[str] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        tab = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **parameters):
        """Call a method of the protocol and return its result."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        self._pipe.send({"id": self._number, "method": method, "params": parameters, **session})
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            message = self._pipe.receive(deadline - time.monotonic())
            self._note(message)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _note(self, message) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif message.get("method") == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.errors.append(str([value.get("value") for value in parameters["args"]]))

    def run(self, script: str):
        """Return the value of an expression, of a promise what it is resolved with."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = TIMEOUT_S):
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(f"(found => found instanceof Node || found)({script})")):
            assert time.monotonic() < deadline, f"never true: {script}; errors of the page: {self.errors}"
            time.sleep(0.05)
        return value

    def open(self, address: str) -> None:
        """Open an address and wait until the page says that it is ready."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)
        self.wait("document.body && document.body.dataset.ready === 'yes'")

    def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Set the window's size and the theme that the system prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


class Pipe:
    """Messages to and from the browser, each ended by a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in, self._rest = to_browser, from_browser, b""

    def send(self, message) -> None:
        """Write a message."""
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]

    def receive(self, seconds: float):
        """Return the next message, which must come in time."""
        deadline = time.monotonic() + seconds
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            read = os.read(self._in, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browser(command: str):
    """A page of a Chromium of its own, driven through pipes: no port, no further package."""
    to_read, to_write = _pipe()
    from_read, from_write = _pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        started = [command, *options, "about:blank"]
        # The browser reads descriptor 3 and writes 4.
        through = ["bash", "-c", f'exec 3<&{to_read} 4>&{from_write}; exec "$@"', "sh", *started]
        process = subprocess.Popen(
            through, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(to_read, from_write)
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(Pipe(to_write, from_read))
        finally:
            process.terminate()
            process.wait(30)
            os.close(to_write)
            os.close(from_read)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends have numbers that are out of the way of those that the browser uses."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
