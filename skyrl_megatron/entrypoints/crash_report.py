"""Report the end of a run whose process is gone: ended by a signal, a library, or the loss of its Ray.

The process that says so is a program of its own, alive when all else has been killed, and imports nothing of this
package.
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
"""Processes of a Ray of our own without which a run cannot go on: name of the process → as it is called here. Ray
itself ends the run's process then, at once or a minute later, without a message."""
LOST = {"Failed to connect to GCS": "gcs_server"}
"""What Ray's library says, last of all, where a part is there and does not answer: it ends the run's process."""
DONE, SILENT = b".", "silent"
LINE = 300
"""Characters of the log that are quoted, at most."""
DEADLINE_S, GRACE_S = 10, 2
LOOK_S, SILENT_LOOKS = 10, 9
"""Between two looks at Ray's head, and looks that it may leave unanswered: at a run's end Ray gives it a minute."""


@contextlib.contextmanager
def last_words(log: Path, terminal: int) -> Iterator[None]:
    """Within the block, have the end of this process told on the stream ``terminal`` (a file descriptor), unless the
    block is left. The end of a part of our Ray ends this process too, with exit code 1, and all that it started; so
    does a head that hangs, and a node that does, once the head takes it for dead: Ray waits for both without end.

    ``log``: where libraries write, whose last line is quoted.
    """
    import psutil

    children = psutil.Process().children(recursive=True)
    parts = {os.pidfd_open(child.pid): (PARTS[child.name()], child.pid) for child in children if child.name() in PARTS}
    own, terminal = os.pidfd_open(os.getpid()), os.dup(terminal)  # it may be what the teller's own stderr replaces
    order = json.dumps({"own": own, "pid": os.getpid(), "parts": parts, "terminal": terminal, "log": str(log)})
    command = [sys.executable, "-I", "-S", __file__, order]
    with subprocess.Popen(
        command,
        pass_fds=(own, terminal, *parts),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as teller:
        os.close(own)
        os.close(terminal)
        try:
            with _ending_with(parts, teller) if parts else contextlib.nullcontext():
                yield
        finally:
            try:
                teller.communicate(DONE, timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:  # stopped, perhaps
                teller.kill()


@contextlib.contextmanager
def _ending_with(parts: dict[int, tuple[str, int]], teller: subprocess.Popen[bytes]) -> Iterator[None]:
    left, leave = os.pipe()
    watch = threading.Thread(target=_end_with, args=(parts, left, teller), daemon=True, name="ray parts")
    watch.start()
    try:
        yield
    finally:
        os.close(leave)
        watch.join(DEADLINE_S)


def _end_with(parts: dict[int, tuple[str, int]], left: int, teller: subprocess.Popen[bytes]) -> None:
    """End this process with the first of ``parts``, handles of ``pidfd_open``, that ends or hangs, unless nobody is
    there to tell it. Returns once the other end of ``left``, a pipe, is closed."""
    from skyrl_megatron.interrupts import kill_descendants

    waiting = select.poll()
    for handle in (left, *parts):
        waiting.register(handle, select.POLLIN | select.POLLHUP)
    head, hangs = _Head(), ""
    while not (ended := [handle for handle, _ in waiting.poll(1000 * LOOK_S)]) and not (hangs := head.look()):
        pass
    if left in ended:
        head.leave()
        os.close(left)
        return
    said = f"{ended[0]}" if ended else f"{next(h for h, (name, _) in parts.items() if name == PARTS[hangs])} {SILENT}"
    if teller.poll() is None:
        os.write(teller.stdin.fileno(), said.encode())  # type: ignore[union-attr]
        kill_descendants(teller.pid)
        os._exit(1)


class _Head:
    """Ray's head, asked again and again whether it still hears from the node of this process."""

    def __init__(self) -> None:
        self._asking: threading.Thread | None = None
        self._looks = 0
        self._gave_up_node = False

    def look(self) -> str:
        """Return which part of Ray hangs, a name of :data:`PARTS`; "": none as far as is known. Does not wait."""
        if self._asking is not None and self._asking.is_alive():
            self._looks += 1  # and not seconds, as this process may be stopped itself
            return "gcs_server" if self._looks >= SILENT_LOOKS else ""
        if self._gave_up_node:
            return "raylet"
        self._looks, self._asking = 0, threading.Thread(target=self._ask, daemon=True, name="ray head")
        self._asking.start()
        return ""

    def leave(self) -> None:
        """Let an answer that is due come, as nobody may ask a Ray that ends."""
        if self._asking is not None:
            self._asking.join(GRACE_S)

    def _ask(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):  # there is no head that could say so
            if ray.is_initialized():
                own = ray.get_runtime_context().get_node_id()
                self._gave_up_node = any(node["NodeID"] == own and not node["Alive"] for node in ray.nodes())


def _tell(own: int, pid: int, parts: dict[str, tuple[str, int]], terminal: int, log: str) -> None:
    """Wait until the run says that it is done, or say what ended it."""
    waiting = select.poll()
    for handle in (0, own, *map(int, parts)):
        waiting.register(handle, select.POLLIN | select.POLLHUP)
    first = waiting.poll()[0][0]
    part = first not in (0, own)
    ends, _, _ = select.select([0], [], [], GRACE_S if part else 0)  # a process that is killed takes its Ray along
    said = os.read(0, 1 << 10) if ends else str(first).encode() if part else b""
    if said == DONE:
        return
    if said:
        which, _, silent = said.decode().partition(" ")
        name, number = parts[which]
        what = f"{name}, pid {number}, {'does not answer any more' if silent else 'died'}, and the run ended with it"
    else:
        last = _last(log)
        what = f"the run's process, pid {pid}, was killed, or ended by a library; the last line of {log}: {last}"
        for words, name in LOST.items():
            if words in last:
                what = f"{PARTS[name]} does not answer any more, and Ray ended the run"
    os.write(terminal, f"{what}; the same command continues from the last checkpoint\n".encode())


def _last(log: str) -> str:
    with open(log, errors="replace") as file:
        lines = file.read().split("\n")
    return next((line.strip()[:LINE] for line in reversed(lines) if line.strip()), "nothing")


if __name__ == "__main__":
    _tell(**json.loads(sys.argv[1]))
