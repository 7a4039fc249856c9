"""A fork server: a process that imports all libraries once and forks the processes that need them.

Importing torch, Megatron and vLLM takes 15 s of a core. A forked process has them at once, shares their memory, and
differs from a newly started process only in its parent. The server is that of CPython
(``multiprocessing.forkserver``), with its protocol and its exit codes. This module starts servers, and lets a command
run as a forked process (:func:`main`), because Ray starts its workers by a command.

Forking a process with threads is not safe, so a server has no threads when it forks. Imports may read environment
variables, so a process whose variables with a prefix in :data:`READ_BY_IMPORTS` differ is started without the server.
This module imports only the standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import resource
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, reduction, resource_tracker
from pathlib import Path
from typing import IO, Any, NoReturn

from skyrl_megatron.errors import LaunchError
from skyrl_megatron.interrupts import hangups_blocked

READ_BY_IMPORTS = (
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "TORCH", "PYTORCH_", "TRITON_", "NVTE_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "PYTHONPATH", "PYTHONWARNINGS", "LD_LIBRARY_PATH"),
)
"""Prefixes of environment variables that libraries, including OpenMP, read only once, when they are imported."""
SET_BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR",)
"""Variables with such a prefix that a library sets on import. They are ignored in the comparison, because the process
that starts others may have imported the library."""
SERVING = "--serving"
"""Option of the command: the process gets a separate fork server for its children."""
SOCKET = "socket"
"""File name of a server's socket in its folder."""
END_MS = 10_000
PR_SET_PDEATHSIG = 1
"""Option of ``prctl(2)``."""


class ForkServer:
    """The client side of a server. The server ends with the process that started it.

    ``alive``: the pipe whose end stops the server. ``process``: id of the server, if this process started it.
    """

    def __init__(self, address: str, alive: int, process: int | None = None, log: IO[bytes] | None = None) -> None:
        self.address = address
        self._alive, self._log = alive, log
        self._handle = None if process is None else os.pidfd_open(process)

    @classmethod
    def start(cls, imports: str, environment: Mapping[str, str]) -> ForkServer:
        """Start a server with these environment variables. Returns at once; requests wait until its imports are done.

        ``imports``: ``module:function`` that imports the libraries.
        """
        with _Listener() as listener:
            reader, writer = os.pipe()
            log = tempfile.TemporaryFile()
            arguments = (listener.address, listener.fileno(), reader, imports)
            program = f"import sys; sys.path[:] = {sys.path!r}; from skyrl_megatron.fork_server import serve; "
            try:
                with hangups_blocked():
                    process = subprocess.Popen(
                        [sys.executable, "-c", f"{program}serve(*{arguments!r})"],
                        env=environment,
                        pass_fds=(listener.fileno(), reader),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
            except BaseException:
                os.close(writer)
                raise
            finally:
                os.close(reader)
        server = cls(listener.address, writer, process.pid, log)
        atexit.register(server.stop)
        return server

    @classmethod
    def fork(cls) -> ForkServer:
        """Fork a server from this process, with its imports. The process must have no threads."""
        with _Listener(_address and f"{Path(_address).parent}/{os.getpid()}") as listener:
            reader, writer = os.pipe()
            process = os.fork()
            if process == 0:
                with _exiting():
                    os.close(writer)
                    _serve(listener.address, listener.detach(), reader)
            os.close(reader)
        return cls(listener.address, writer, process)

    def connect(self, descriptors: Sequence[int]) -> tuple[int, int]:
        """Fork a process that gets ``descriptors``.

        Returns two file descriptors: one to read the id and later the exit code of the process, one to write its
        pickled task. Raises OSError if the server has ended.
        """
        tracker: Any = resource_tracker._resource_tracker
        return _connect(self.address, [self._alive, tracker.getfd(), *descriptors])

    def is_alive(self) -> bool:
        """Return whether the server runs, as far as this process can tell."""
        return self._handle is None or not _wait(self._handle, 0)

    def last_line(self) -> str:
        """Return the last line of the server's output, which has the reason if it ended."""
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def stop(self) -> None:
        """Stop the server and wait for its end. The processes that it forked continue."""
        if self._handle is not None and self.is_alive():
            os.close(self._alive)
            if not _wait(self._handle, END_MS):  # it may be stopped (SIGSTOP)
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            if Path(self.address).name == SOCKET:
                shutil.rmtree(Path(self.address).parent, ignore_errors=True)


ADDRESS_CHARACTERS = 90
"""Limit of a server's folder. Servers that its processes fork have sockets named by their id in it."""
SHORT_FOLDERS = ("/tmp", "/dev/shm")
"""Where sockets go if the path of ``TMPDIR`` is too long, as in some jobs of a cluster."""


def socket_folder(prefix: str, characters: int) -> str:
    """Create a folder that only this user can access, and return its path of at most ``characters`` characters.

    It is in the usual temporary folder if that path is short enough, else in one of :data:`SHORT_FOLDERS`. Linux
    limits the path of a socket to 107 characters. Raises LaunchError if no folder can be written.
    """
    usual = tempfile.gettempdir()
    for parent in (usual, *SHORT_FOLDERS):
        if len(os.fsencode(parent)) + len(prefix) + _RANDOM <= characters:
            with contextlib.suppress(OSError):
                return tempfile.mkdtemp(prefix=prefix, dir=parent)
    raise LaunchError(
        f"TMPDIR={usual}: cannot be written or is too long for the path of a socket, and {', '.join(SHORT_FOLDERS)} "
        "cannot be written either: set TMPDIR to a folder with a shorter path"
    )


_RANDOM = len("/12345678")
"""Characters that ``tempfile.mkdtemp`` adds to folder and prefix."""


class _Listener(socket.socket):
    """A listening socket in a folder that only this user can access.

    The folder is that of the server that forked this process, which removes it in any case, or else a new one.
    """

    def __init__(self, address: str = "") -> None:
        super().__init__(socket.AF_UNIX)
        self.address = address or str(Path(socket_folder("skyrl-fork-", ADDRESS_CHARACTERS)) / SOCKET)
        Path(self.address).unlink(missing_ok=True)  # left by a killed process with the same id
        self.bind(self.address)
        self.listen(socket.SOMAXCONN)


# ---------------------------------------------------------------------------------------------- the server's process
_environment: dict[str, str] = {}
"""Environment variables of the server before its imports."""
_address = ""
"""Address of the server that this process is, or that forked it."""


def serve(address: str, listener: int, alive: int, imports: str) -> None:
    """Run a server on the socket ``listener`` at ``address`` until the other end of the pipe ``alive`` is closed."""
    global _address
    _address = address
    _environment.update(os.environ)
    gc.disable()  # imports create no garbage worth collecting
    left, leave = os.pipe()
    watch = threading.Thread(target=_end_with_starter, args=(address, alive, left))
    watch.start()
    module, _, function = imports.partition(":")
    try:
        getattr(importlib.import_module(module), function)()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        _remove(address)
        os._exit(1)
    os.close(leave)
    watch.join()
    os.close(left)
    gc.collect()
    gc.freeze()  # garbage collection in forked processes would write to all of it, and so copy it
    gc.enable()
    with _exiting():  # a regular exit of the interpreter takes seconds after these imports
        try:
            _serve(address, listener, alive)
        finally:
            shutil.rmtree(Path(address).parent, ignore_errors=True)


def _serve(address: str, listener: int, alive: int) -> None:
    try:
        while True:
            try:
                forkserver.main(listener, alive, [])
            except EOFError:  # the client was killed before it sent its request
                Path(address).unlink()
                listener = _Listener(address).detach()
    finally:
        _remove(address)


def _end_with_starter(address: str, alive: int, left: int) -> None:
    """End this process if its starter ends during the imports."""
    ends, _, _ = select.select([alive, left], [], [])
    if alive in ends:
        _remove(address)
        os._exit(0)


def _remove(address: str) -> None:
    with contextlib.suppress(OSError):
        Path(address).unlink()
        Path(address).parent.rmdir()


@contextlib.contextmanager
def _exiting() -> Iterator[None]:
    """End this process at the end of the block: a forked process must not continue its parent's program."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as ended:
        code = _exit_code(ended)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# ---------------------------------------------------------------------------------------------- asking for a process
def command(server: ForkServer, *, serving: bool = False) -> str:
    """Return the shell command that replaces ``python``: it runs the program in a process that ``server`` forks.

    If the server has ended, the program runs as with ``python``. ``serving``: the process gets a separate server
    (:func:`inherited`), which forks its children.
    """
    root = str(Path(__file__).resolve().parents[1])
    program = f"import sys; sys.path.append({root!r}); from skyrl_megatron.fork_server import main; main()"
    options = [SERVING] if serving else []
    return shlex.join([sys.executable, "-I", "-S", "-c", program, server.address, *options])


def main() -> NoReturn:
    """Run ``SCRIPT ARGUMENT…`` in a forked process and exit with its code; ``argv``: ``ADDRESS [--serving] SCRIPT …``.

    The process has the environment, working directory, limits, signal mask and standard streams of this one. Each of
    the two processes ends with the other.
    """
    starter = os.getppid()
    address, *arguments = sys.argv[1:]
    serving = arguments[0] == SERVING
    if serving:
        del arguments[0]
    nothing = os.open(os.devnull, os.O_RDWR)  # for the pipes that multiprocessing's children share with their parent
    reader, answer = os.pipe()
    try:
        status, order = _connect(address, [nothing, nothing, 0, 1, 2, answer])
        with os.fdopen(order, "wb") as file:
            pickle.dump({}, file)
            pickle.dump(_Program(arguments, serving=serving), file)
        child = forkserver.read_signed(status)
        os.close(answer)
        with os.fdopen(reader) as file:
            refused = file.read()
    except (OSError, EOFError) as error:
        refused = str(error) or "the server ended"
    if refused:
        print(f"fork server: {refused}; this process starts without it", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *arguments])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: _send(child, number))
    try:
        code = forkserver.read_signed(status)
    except EOFError:  # the server ended, but the process still runs
        code = 1
        with contextlib.suppress(ProcessLookupError):
            _wait_or_kill(starter, child)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _connect(address: str, descriptors: Sequence[int]) -> tuple[int, int]:
    """Make the server at ``address`` fork, like CPython's ``ForkServer.connect_to_new_process``."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        status, status_writer = os.pipe()
        order, order_writer = os.pipe()
        try:
            reduction.sendfds(client, [order, status_writer, *descriptors])
        except BaseException:
            os.close(status)
            os.close(order_writer)
            raise
        finally:
            os.close(order)
            os.close(status_writer)
    return status, order_writer


class _Program:
    """A script and the state of the starting process, pickled for the forked process."""

    def __init__(self, arguments: Sequence[str], *, serving: bool) -> None:
        self.arguments, self.serving = list(arguments), serving
        self.starter = os.getpid()
        self.environment, self.folder = dict(os.environ), os.getcwd()
        self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self.limits = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)}
        self.mask = os.umask(0)
        os.umask(self.mask)
        self.niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self.killed_first = Path("/proc/self/oom_score_adj").read_text()

    def _bootstrap(self, parent_sentinel: int) -> None:
        """Run the script and end the process. CPython's server calls this in the forked process.

        Refuses to run if the imports may have read other environment variables.
        """
        with _exiting():
            os.close(parent_sentinel)
            *streams, answer = forkserver._forkserver._inherited_fds  # type: ignore[attr-defined]
            if differing := sorted(self._differing()):
                os.write(answer, f"the server has another {', '.join(differing)}".encode())
                return
            os.close(answer)
            self._take_place(streams)
            if self.serving:
                _inherited.append(ForkServer.fork())
            end_with(self.starter)
            sys.argv[:] = self.arguments
            try:
                runpy.run_path(self.arguments[0], run_name="__main__")
            finally:
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()

    def _take_place(self, streams: Sequence[int]) -> None:
        """Adopt the state of the process that sent the request."""
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin = open(0, closefd=False)  # CPython's server has replaced it
        tracker: Any = resource_tracker._resource_tracker
        os.close(tracker._fd)
        tracker._fd = None
        os.environ.clear()
        os.environ.update(self.environment)
        tempfile.tempdir = None  # depends on the environment
        os.chdir(self.folder)
        os.umask(self.mask)
        for kind, limits in self.limits.items():
            resource.setrlimit(kind, limits)
        with contextlib.suppress(PermissionError):
            Path("/proc/self/oom_score_adj").write_text(self.killed_first)
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)

    def _differing(self) -> set[str]:
        """Return the environment variables that the imports may have read with other values."""
        names = {name for name in {*self.environment, *_environment} if name.startswith(READ_BY_IMPORTS)}
        return {
            name for name in names.difference(SET_BY_IMPORTS) if self.environment.get(name) != _environment.get(name)
        }


_inherited: list[ForkServer] = []


def inherited() -> ForkServer | None:
    """Return the server that this process got at its start with ``serving`` (:func:`command`), or None."""
    return _inherited[0] if _inherited else None


def end_with(process: int) -> None:
    """Kill this process when ``process`` ends, for any reason."""
    threading.Thread(target=_end_with, args=(process,), name=f"end with {process}", daemon=True).start()


def end_with_server() -> None:
    """Let the kernel kill this forked process when its server ends.

    This also works for a stopped process (SIGSTOP), whose threads do not run.
    """
    server = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)


def _end_with(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        _wait(os.pidfd_open(process))
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_or_kill(starter: int, child: int) -> None:
    """Wait for the end of ``child``. Kill it if ``starter``, the parent of this process, has ended before.

    A process that is stopped (SIGSTOP) does not notice that it is alone. ``starter`` is Ray's raylet.
    """
    handle = os.pidfd_open(child)
    while not _wait(handle, END_MS):
        if os.getppid() != starter:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            _wait(handle, END_MS)
            return


def _wait(handle: int, timeout_ms: int | None = None) -> bool:
    """Wait for the end of a process, given its ``pidfd_open`` handle. Return whether it ended."""
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(timeout_ms))


def _exit_code(ended: SystemExit) -> int:
    """Return the exit code that the interpreter would use."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1
