"""The two processes of a sandbox of namespaces: its keeper, and process 1, which runs the commands.

The run starts the keeper (:mod:`.namespaces`). It enters new user, mount, process, network,
IPC, host-name and control-group namespaces and forks process 1. The kernel kills every process of a process namespace
together with its process 1, which ends

* when the run ends in any way: the keeper polls the run's process, and process 1 reads end-of-file from it,
* when the keeper ends in any way (``PR_SET_PDEATHSIG``), or
* when the sandbox reaches its lifetime.

Requests and replies are frames on a socket pair: four bytes of length, big-endian, and the content. A request is a
JSON object and a frame of bytes (stdin or an archive); a reply is a JSON object and two frames, stdout and stderr.
This module imports the standard library only, so that a sandbox starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from skyrl_megatron_agents.sandboxes import confine

NAMESPACES = (
    *(os.CLONE_NEWUSER, os.CLONE_NEWNS, os.CLONE_NEWPID, os.CLONE_NEWNET),
    *(os.CLONE_NEWIPC, os.CLONE_NEWUTS, os.CLONE_NEWCGROUP),
)
READ = 1 << 16
DESCRIPTORS = 256
"""Process 1 has fewer open files."""
LOOK_S = 0.05
"""Time in seconds between two looks at the memory of a sandbox without control groups."""
END_S = 5.0
"""Time in seconds that killed processes have to disappear."""
NOT_EXECUTED = 127
REASON = 4000
"""Longest reason in bytes why a command could not be executed."""


def send(channel: socket.socket, *frames: bytes) -> None:
    """Send frames."""
    for frame in frames:
        channel.sendall(struct.pack(">I", len(frame)) + frame)


def receive(channel: socket.socket) -> bytes:
    """Return the next frame. Raises EOFError if the other side is gone."""
    (length,) = struct.unpack(">I", _exactly(channel, 4))
    return _exactly(channel, length)


def _exactly(channel: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = channel.recv(min(length - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts += part
    return bytes(parts)


def keep(channel: socket.socket) -> NoReturn:
    """Be the keeper: enter the namespaces, fork process 1, and end with it, with the run, or at the lifetime."""
    settings = json.loads(receive(channel))
    run = os.pidfd_open(settings["run"])
    if os.getppid() != settings["run"]:
        os._exit(1)
    for folder in settings["control_groups"]:
        Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    user, group = os.geteuid(), os.getegid()
    flags = 0
    for flag in NAMESPACES:
        flags |= flag
    os.unshare(flags)
    if settings["mapped"]:
        send(channel, b"unshared")
        receive(channel)
    else:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    child = os.fork()
    if not child:
        os.close(run)
        serve(channel, settings)
    channel.close()
    ended = select.poll()
    ended.register(run, select.POLLIN)
    ended.register(os.pidfd_open(child), select.POLLIN)
    ended.poll(int(settings["lifetime_s"] * 1000))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os._exit(0)


def serve(channel: socket.socket, settings: Mapping[str, Any]) -> NoReturn:
    """Be process 1: build the root, report that, and run one request after the other until the run is gone."""
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
    confine.prctl(confine.PR_SET_DUMPABLE, 0)  # no command traces this process or reads its memory
    os.umask(0o022)
    confine.make_root(settings)
    confine.loopback_up()
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if settings["relay"]:
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            ready = json.dumps({"ready": True, "port": listener.getsockname()[1]}).encode()
            send(channel, ready)
            socket.send_fds(channel, [b"L"], [listener.fileno()])
    else:
        send(channel, json.dumps({"ready": True}).encode())
    try:
        while True:
            request, payload = json.loads(receive(channel)), receive(channel)
            reply, stdout, stderr = Command(channel, settings, reader).run(request, payload)
            send(channel, json.dumps(reply).encode(), stdout, stderr)
    except (EOFError, ConnectionError):
        os._exit(0)


class Kept:
    """Output of a command: its first and its last bytes, at most ``limit`` together."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self.truncated = False

    def add(self, data: bytes) -> None:
        """Add output. What is in the middle is dropped."""
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[max(room, 0) :]
        if len(self._tail) > self._half:
            self.truncated = True
            del self._tail[: -self._half or None]

    def value(self) -> bytes:
        """Return what is kept."""
        return bytes(self._head + self._tail)


class Command:
    """One request: a forked process with the rights of an agent, its pipes, and the end of all that it started."""

    def __init__(self, channel: socket.socket, settings: Mapping[str, Any], signals: int) -> None:
        self._channel, self._settings, self._signals = channel, settings, signals
        self._status: int | None = None

    def run(self, request: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes, bytes]:
        """Run a request to its end or its time limit. Returns a reply, stdout and stderr."""
        began = time.monotonic()
        try:
            self._start(self._work(request))
        except OSError as error:
            return {"failed": f"cannot start a process in the sandbox: {error}"}, b"", b""
        kept = {
            self._out: Kept(request["limit"]),
            self._err: Kept(self._settings["output"]),
            self._failure: Kept(2 * REASON),
        }
        timed_out, out_of_memory = self._wait(began + request["timeout_s"], payload, kept)
        gone = self._end_all(kept)
        stdout, stderr, failure = kept.values()
        for descriptor in kept:
            os.close(descriptor)
        reply: dict[str, Any] = {
            "exit_code": os.waitstatus_to_exitcode(self._status or 0),
            "timed_out": timed_out,
            "out_of_memory": out_of_memory,
            "truncated": stdout.truncated or stderr.truncated,
            "seconds": time.monotonic() - began,
        }
        if not gone:
            reply["failed"] = f"processes of the sandbox did not end within {END_S:g} s of SIGKILL"
        elif text := failure.value():
            reply["failed"] = text.decode(errors="replace")
        return reply, stdout.value(), stderr.value()

    def _work(self, request: Mapping[str, Any]) -> Callable[[], None]:
        """Return what the forked process does."""
        folder = os.path.normpath("/" + request["folder"].lstrip("/"))  # it would keep two at the begin

        def execute() -> None:
            os.chdir(folder)
            os.execvpe(request["command"][0], request["command"], request["environment"])

        def put() -> None:
            os.makedirs(folder, exist_ok=True)
            with tarfile.open(fileobj=os.fdopen(0, "rb"), mode="r|") as archive:
                archive.extractall(folder, filter="tar")

        def get() -> None:
            _make_readable(folder)
            with tarfile.open(fileobj=os.fdopen(1, "wb"), mode="w|") as archive:
                archive.add(folder, arcname=".")

        if request["verb"] == "put" and not folder.startswith(tuple(f"{writable}/" for writable in confine.WRITABLE)):
            self._make_folder(folder)
        return {"run": execute, "put": put, "get": get}[request["verb"]]

    def _make_folder(self, folder: str) -> None:
        """Make a folder that an agent could not make, and give it to the agent. No path of the agent is followed."""
        if os.path.realpath(folder) != folder:
            return
        with confine.writable_root():
            if not os.path.lexists(folder):
                os.makedirs(folder)
                owner = confine.AGENT if self._settings["mapped"] else 0
                os.chown(folder, owner, owner)
        if os.statvfs(folder).f_flag & os.ST_RDONLY:  # no part of another folder that can be written to
            with confine.writable_root():
                confine.give(folder)

    def _start(self, work: Callable[[], None]) -> None:
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(4)]
        (stdin, self._in), (self._out, stdout), (self._err, stderr), (self._failure, failure) = pipes
        self._main = os.fork()
        if not self._main:
            _be_command(self._settings, work, (stdin, stdout, stderr), failure)
        for each in (stdin, stdout, stderr, failure):
            os.close(each)
        for each in (self._in, self._out, self._err, self._failure):
            os.set_blocking(each, False)

    def _wait(self, deadline: float, payload: bytes, kept: Mapping[int, Kept]) -> tuple[bool, bool]:
        """Move input and output until the command ends. Returns whether its time and its memory ran out."""
        ready = select.poll()
        for descriptor in (self._signals, self._channel.fileno(), *kept):
            ready.register(descriptor, select.POLLIN)
        left = memoryview(payload)
        if left:
            ready.register(self._in, select.POLLOUT)
        else:
            os.close(self._in)
        counted = self._settings["counted"]
        try:
            while self._status is None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return True, False
                for descriptor, _ in ready.poll(1000 * (remaining if counted else min(remaining, LOOK_S))):
                    if descriptor == self._channel.fileno() and not self._channel.recv(1, socket.MSG_PEEK):
                        os._exit(0)
                    elif descriptor == self._signals:
                        os.read(self._signals, READ)
                        self._reap()
                    elif descriptor == self._in:
                        left = _write(descriptor, left)
                        if not left:
                            ready.unregister(descriptor)
                            os.close(descriptor)
                    elif descriptor in kept and not _read(descriptor, kept[descriptor]):
                        ready.unregister(descriptor)
                if not counted and memory_used() > self._settings["memory"]:
                    return False, True
            return False, False
        finally:
            if left:
                os.close(self._in)

    def _reap(self) -> None:
        """Collect ended processes, also those whose parent ended before them."""
        while True:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not ended:
                return
            if ended == self._main:
                self._status = status

    def _end_all(self, kept: Mapping[int, Kept]) -> bool:
        """Kill every other process of the sandbox and read what they wrote. Returns whether none is left."""
        deadline = time.monotonic() + END_S
        gone = False
        while not gone and time.monotonic() < deadline:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                gone = True
            self._reap()
            if not gone:
                time.sleep(0.001)
        for descriptor, output in kept.items():
            while _read(descriptor, output):
                pass
        return gone


def _be_command(
    settings: Mapping[str, Any], work: Callable[[], None], streams: tuple[int, int, int], failure: int
) -> NoReturn:
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate((*streams, failure)):
            os.dup2(stream, number, inheritable=number < 3)
        failure = 3
        os.closerange(4, DESCRIPTORS)  # the other ends of its pipes, of which it must see the end
        confine.become_agent(settings)
        work()
        os._exit(0)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        os.write(failure, text.encode(errors="replace")[:REASON])
    os._exit(NOT_EXECUTED)


def _make_readable(folder: str) -> None:
    """Give the agent the rights to read all of its files, which it may have taken away."""
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            each = os.path.join(path, name)
            mode = os.lstat(each).st_mode
            if not stat.S_ISLNK(mode):
                os.chmod(each, mode & 0o7777 | (0o700 if stat.S_ISDIR(mode) else 0o400))


def _write(pipe: int, left: memoryview) -> memoryview:
    try:
        return left[os.write(pipe, left[:READ]) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:  # the command does not read its input
        return left[len(left) :]


def _read(pipe: int, output: Kept) -> bool:
    """Read once. Returns whether there may be more."""
    try:
        data = os.read(pipe, READ)
    except BlockingIOError:
        return False
    output.add(data)
    return bool(data)


def memory_used() -> int:
    """Return the bytes that all other processes of this namespace use, and those that their sockets may hold. Pages
    that they share count for each of them; shared memory without a file counts as a whole, because what was written
    to it stays there when a process gives up its pages."""
    total, shared = 0, dict[bytes, int]()
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                lines, maps = Path("/proc", name, "status").read_text().splitlines(), b""
                with contextlib.suppress(PermissionError), open(f"/proc/{name}/maps", "rb") as file:
                    maps = file.read(MOST_MAPS + 1)  # not of a process before it executes its command
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ESRCH):
                    continue
                raise
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
            if len(maps) > MOST_MAPS:
                return 1 << 62
            for line in maps.splitlines() if SHARED in maps else ():
                if line.endswith(SHARED):
                    span, _, start, _, inode, *_ = line.split()
                    first, _, last = span.partition(b"-")
                    end = int(start, 16) + int(last, 16) - int(first, 16)
                    shared[inode] = max(shared.get(inode, 0), end)
    return total + sum(shared.values()) + max(0, _sockets() - FEW_SOCKETS) * SOCKET_BYTES


SHARED = b" /dev/zero (deleted)"
"""End of the lines of ``/proc/PID/maps`` of shared memory without a file."""
MOST_MAPS = 1 << 21
"""Bytes of ``/proc/PID/maps`` from which on a process counts as over any limit: some 20,000 mappings."""
FEW_SOCKETS, SOCKET_BYTES = 64, 2 * confine.TCP_BYTES
"""Sockets that are not counted, and bytes that a further one may hold: a program may double its buffer."""


def _sockets() -> int:
    """Return the number of sockets of this network namespace."""
    first = Path("/proc/net/sockstat").read_text().partition("\n")[0]
    return int(first.rpartition(" ")[2])


def main() -> NoReturn:
    """Be the keeper on the socket whose descriptor is the first argument. An error is the first frame it sends."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    try:
        keep(channel)
    except (EOFError, ConnectionError):
        os._exit(1)
    except BaseException as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        send(channel, json.dumps({"error": text}).encode())
        os._exit(1)
