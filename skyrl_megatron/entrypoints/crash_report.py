"""Report the end of a run whose process died: killed by a signal, ended by a library, or ended with its Ray cluster.

A separate reporter process prints the report, because it survives when the run's process is killed. The reporter runs
this file as a program, which imports no other module of this package.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

PARTS = {"gcs_server": "Ray's head (gcs_server)", "raylet": "Ray's node (raylet)"}
"""Processes of the Ray cluster that this run started, without which it cannot continue: process name → its name in
messages. If one dies, Ray ends the run's process without a message, at once or a minute later."""
LOST = {"Failed to connect to GCS": "gcs_server"}
"""Last line of the log if Ray ends the run's process because a Ray process does not answer → name of that process."""
DONE, SILENT = b".", "silent"
LINE = 300
"""Maximum number of quoted characters of the log."""
DEADLINE_S, GRACE_S = 10, 2
POLL_S, SILENT_POLLS = 10, 9
"""Seconds between two polls of Ray's head, and number of unanswered polls after which it hangs. At the end of a run,
Ray itself allows it a minute."""


@contextlib.contextmanager
def crash_reporter(log: Path, terminal: int) -> Iterator[None]:
    """Start a reporter process for the block. If this process dies within the block, the reporter writes one line to
    ``terminal`` (a file descriptor).

    If a process of this run's Ray cluster dies or hangs, this process and its children are killed, with exit code 1,
    because Ray would wait for it without a timeout. A node hangs if Ray's head reports it dead.

    ``log``: the file that libraries write to; the report quotes its last line.
    """
    import psutil

    children = psutil.Process().children(recursive=True)
    parts = {os.pidfd_open(child.pid): (PARTS[child.name()], child.pid) for child in children if child.name() in PARTS}
    process, terminal = os.pidfd_open(os.getpid()), os.dup(terminal)  # may be stderr, which the reporter redirects
    order = json.dumps({"process": process, "pid": os.getpid(), "parts": parts, "terminal": terminal, "log": str(log)})
    command = [sys.executable, "-I", "-S", __file__, order]
    with subprocess.Popen(
        command,
        pass_fds=(process, terminal, *parts),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as reporter:
        os.close(process)
        os.close(terminal)
        try:
            with _watch(parts, reporter) if parts else contextlib.nullcontext():
                yield
        finally:
            try:
                reporter.communicate(DONE, timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:  # stopped, perhaps
                reporter.kill()


@contextlib.contextmanager
def _watch(parts: dict[int, tuple[str, int]], reporter: subprocess.Popen[bytes]) -> Iterator[None]:
    left, leave = os.pipe()
    watch = threading.Thread(target=_end_with_part, args=(parts, left, reporter), daemon=True, name="ray parts")
    watch.start()
    try:
        yield
    finally:
        os.close(leave)
        watch.join(DEADLINE_S)


def _end_with_part(parts: dict[int, tuple[str, int]], left: int, reporter: subprocess.Popen[bytes]) -> None:
    """End this process when one of ``parts``, handles of ``pidfd_open``, dies or hangs, unless the reporter is gone.
    Returns when the other end of the pipe ``left`` is closed."""
    from skyrl_megatron.interrupts import kill_descendants

    waiting = select.poll()
    for handle in (left, *parts):
        waiting.register(handle, select.POLLIN | select.POLLHUP)
    head, hangs = _RayHead(), ""
    while not (ended := [handle for handle, _ in waiting.poll(1000 * POLL_S)]) and not (hangs := head.poll()):
        pass
    if left in ended:
        head.leave()
        os.close(left)
        return
    message = (
        f"{ended[0]}" if ended else f"{next(h for h, (name, _) in parts.items() if name == PARTS[hangs])} {SILENT}"
    )
    if reporter.poll() is None:
        os.write(reporter.stdin.fileno(), message.encode())  # type: ignore[union-attr]
        kill_descendants(reporter.pid)
        os._exit(1)


class _RayHead:
    """Polls Ray's head, and asks it whether the node of this process is alive."""

    def __init__(self) -> None:
        self._asking: threading.Thread | None = None
        self._polls = 0
        self._gave_up_node = False

    def poll(self) -> str:
        """Return which Ray process hangs, a key of :data:`PARTS`; "" if none is known to hang. Does not wait."""
        if self._asking is not None and self._asking.is_alive():
            self._polls += 1  # a count of polls, not of seconds, because this process may be suspended
            return "gcs_server" if self._polls >= SILENT_POLLS else ""
        if self._gave_up_node:
            return "raylet"
        self._polls, self._asking = 0, threading.Thread(target=self._ask, daemon=True, name="ray head")
        self._asking.start()
        return ""

    def leave(self) -> None:
        """Wait for a pending answer, because Ray must not be asked while it shuts down."""
        if self._asking is not None:
            self._asking.join(GRACE_S)

    def _ask(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):  # the head is gone
            if ray.is_initialized():
                own = ray.get_runtime_context().get_node_id()
                self._gave_up_node = any(node["NodeID"] == own and not node["Alive"] for node in ray.nodes())


def _report(process: int, pid: int, parts: dict[str, tuple[str, int]], terminal: int, log: str) -> None:
    """Wait until the run reports that it is done, or write what ended it."""
    waiting = select.poll()
    for handle in (0, process, *map(int, parts)):
        waiting.register(handle, select.POLLIN | select.POLLHUP)
    first = waiting.poll()[0][0]
    part = first not in (0, process)
    ends, _, _ = select.select([0], [], [], GRACE_S if part else 0)  # a killed process ends its Ray processes too
    message = os.read(0, 1 << 10) if ends else str(first).encode() if part else b""
    if message == DONE:
        return
    if message:
        which, _, silent = message.decode().partition(" ")
        name, number = parts[which]
        what = f"{name}, pid {number}, {'does not answer any more' if silent else 'died'}, and the run ended with it"
    else:
        last = _last_line(log)
        what = f"the run's process, pid {pid}, was killed, or ended by a library; the last line of {log}: {last}"
        for words, name in LOST.items():
            if words in last:
                what = f"{PARTS[name]} does not answer any more, and Ray ended the run"
    os.write(terminal, f"{what}; the same command continues from the last checkpoint\n".encode())


def _last_line(log: str) -> str:
    with open(log, errors="replace") as file:
        lines = file.read().split("\n")
    return next((line.strip()[:LINE] for line in reversed(lines) if line.strip()), "nothing")


if __name__ == "__main__":
    _report(**json.loads(sys.argv[1]))
