"""An object store of a test's own: Moto's S3 on a port of loopback, which the real client (s3fs) reaches by ``s3://``.

Where it is stands in the environment, as it does for users, so that the processes of a run find it too.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

BUCKET = "s3://bucket"
_SERVER = Path(__file__).parents[2] / ".venv-trackers/bin/moto_server"
_PID = "SKYRL_TEST_STORE_PID"
_SETTINGS = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",  # its client gives up after a minute, and not after six
}
START_S = 60.0
SLOW_SHARE, SLICE_S = 0.9, 0.1


def why_not() -> str | None:
    """Return why there can be none here, None if it can."""
    return None if _SERVER.is_file() else "launch/requirements/trackers.sh installs the server"


def start(log: Path) -> None:
    """Start it, unless it is there, and say in the environment where it is; it ends with this process."""
    if _PID in os.environ:
        return
    port = _free_port()
    with log.open("w") as file:
        command = ["setpriv", "--pdeathsig", "KILL", str(_SERVER), "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    atexit.register(process.kill)
    os.environ |= _SETTINGS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", _PID: str(process.pid)}
    end = time.monotonic() + START_S
    while True:
        try:
            _ask("PUT", "/bucket")
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)


def spoil(what: str, lasts_s: float) -> None:
    """``exception``: it knows nobody any more; ``cut link``: it says nothing; ``slow ×10``: for a while it stands
    still for nine tenths of each slice of time."""
    if what == "exception":
        _ask("POST", "/moto-api/reset-auth", b"0")
    elif what == "cut link":
        os.kill(int(os.environ[_PID]), signal.SIGSTOP)
    else:
        threading.Thread(target=_slow, args=(lasts_s,), daemon=True).start()


def mend() -> None:
    """Let it answer everybody at once again."""
    os.kill(int(os.environ[_PID]), signal.SIGCONT)
    _ask("POST", "/moto-api/reset-auth", b"inf")


def _slow(lasts_s: float) -> None:
    end, pid = time.monotonic() + lasts_s, int(os.environ[_PID])
    while time.monotonic() < end:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(SLICE_S * SLOW_SHARE)
        os.kill(pid, signal.SIGCONT)
        time.sleep(SLICE_S * (1 - SLOW_SHARE))


def _ask(method: str, path: str, data: bytes | None = None) -> None:
    headers = {"Content-Type": "text/plain"}
    request = urllib.request.Request(os.environ["AWS_ENDPOINT_URL"] + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=START_S):
        pass


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
