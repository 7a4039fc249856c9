"""A process that has imported everything once, and forks the processes that need it.

torch, Megatron and vLLM take 15 s of a core to import. A fork server imports them once and waits; each process that it
forks has them at once, shares their memory, and differs from one started anew only in its parent. The server is
CPython's own (``multiprocessing.forkserver``): its protocol, its exit codes. Here are how one is started, and how a
program takes a forked process in its own place (:func:`main`): Ray starts its workers by a command.

Forks of threads are not safe, so a server runs none when it forks. What it imports may read its environment, so
that a process whose variables differ in :data:`READ_BY_IMPORTS` is started anew instead. Imports no package but the
standard library.
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

from skyrl_megatron.interrupts import hangups_blocked

READ_BY_IMPORTS = (
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "TORCH", "PYTORCH_", "TRITON_", "NVTE_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "PYTHONPATH", "PYTHONWARNINGS", "LD_LIBRARY_PATH"),
)
"""Prefixes of variables that libraries read when they are imported, OpenMP's among them, and never again."""
SET_BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR",)
"""Those that a library sets itself when it is imported: whoever starts processes may have imported it by then."""
SERVING = "--serving"
"""Option of the command: the process gets a fork server of its own, for children that are its own."""
SOCKET = "socket"
"""Of the server that a folder is made for."""
END_MS = 10_000
PR_SET_PDEATHSIG = 1
"""Of ``prctl(2)``."""


class ForkServer:
    """A server, as those see it that may ask it for processes. It ends when the process that started it does.

    ``alive``: a pipe that it waits for the end of. ``process``: its id, where this process started it.
    """

    def __init__(self, address: str, alive: int, process: int | None = None, log: IO[bytes] | None = None) -> None:
        self.address = address
        self._alive, self._log = alive, log
        self._handle = None if process is None else os.pidfd_open(process)

    @classmethod
    def start(cls, imports: str, environment: Mapping[str, str]) -> ForkServer:
        """Start a server with these variables. Returns at once; requests wait until it has imported.

        ``imports``: ``module:function`` that imports what processes need.
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
        """Fork a server from this process, which must have no threads: it serves what has been imported here."""
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
        """Have a process forked that gets ``descriptors``. Returns where its id and then its exit code can be read,
        and where what it is to do is to be written, pickled. Raises OSError when there is no server any more."""
        tracker: Any = resource_tracker._resource_tracker
        return _connect(self.address, [self._alive, tracker.getfd(), *descriptors])

    def is_alive(self) -> bool:
        """Return whether the server runs, as far as this process can tell."""
        return self._handle is None or not _wait(self._handle, 0)

    def said(self) -> str:
        """Return the last line that the server wrote: why it ended, where it did."""
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def stop(self) -> None:
        """End the server, and wait for its end; the processes that it forked continue."""
        if self._handle is not None and self.is_alive():
            os.close(self._alive)
            if not _wait(self._handle, END_MS):  # stopped, perhaps
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            if Path(self.address).name == SOCKET:
                shutil.rmtree(Path(self.address).parent, ignore_errors=True)


class _Listener(socket.socket):
    """A listening socket in a folder that only this user can enter: that of the server which this process comes from,
    who removes it whatever ends the others, or a new one."""

    def __init__(self, address: str = "") -> None:
        super().__init__(socket.AF_UNIX)
        self.address = address or str(Path(tempfile.mkdtemp(prefix="skyrl-fork-")) / SOCKET)
        Path(self.address).unlink(missing_ok=True)  # of a process of this number that was killed
        self.bind(self.address)
        self.listen(socket.SOMAXCONN)


# ---------------------------------------------------------------------------------------------- the server's process
_environment: dict[str, str] = {}
"""Variables of the server when it began to import."""
_address = ""
"""Of the server that this process is, or comes from."""


def serve(address: str, listener: int, alive: int, imports: str) -> None:
    """Be a server on the socket ``listener``, which ``address`` names, until the other end of the pipe ``alive`` is
    closed."""
    global _address
    _address = address
    _environment.update(os.environ)
    gc.disable()  # what is imported stays
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
    gc.freeze()  # collections in forked processes would write to, and so copy, all of it
    gc.enable()
    with _exiting():  # the interpreter's own end takes seconds for what is imported here
        try:
            _serve(address, listener, alive)
        finally:
            shutil.rmtree(Path(address).parent, ignore_errors=True)


def _serve(address: str, listener: int, alive: int) -> None:
    try:
        while True:
            try:
                forkserver.main(listener, alive, [])
            except EOFError:  # who connected was killed before it asked
                Path(address).unlink()
                listener = _Listener(address).detach()
    finally:
        _remove(address)


def _end_with_starter(address: str, alive: int, left: int) -> None:
    """End this process, while it imports, when its starter ends."""
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
    """End this process with the block, as a forked process must not continue its parent's program."""
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
    """Return, as a shell reads it, what takes the place of ``python`` in a command: the program runs in a process that
    ``server`` forks, or as without one where there is none any more.

    ``serving``: the process gets a server of its own (:func:`inherited`), which forks children of the process.
    """
    root = str(Path(__file__).resolve().parents[1])
    program = f"import sys; sys.path.append({root!r}); from skyrl_megatron.fork_server import main; main()"
    options = [SERVING] if serving else []
    return shlex.join([sys.executable, "-I", "-S", "-c", program, server.address, *options])


def main() -> NoReturn:
    """Run ``SCRIPT ARGUMENT…`` in a forked process, and end as it ends; ``argv``: ``ADDRESS [--serving] SCRIPT …``.

    The process has this one's variables, folder, limits, signal mask and standard streams. Either one ends with the
    other, whatever ended it.
    """
    address, *arguments = sys.argv[1:]
    serving = arguments[0] == SERVING
    if serving:
        del arguments[0]
    nothing = os.open(os.devnull, os.O_RDWR)  # in place of what multiprocessing's own children share with their parent
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
        refused = str(error) or "it ended"
    if refused:
        print(f"fork server: {refused}; this process imports for itself", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *arguments])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: _send(child, number))
    try:
        code = forkserver.read_signed(status)
    except EOFError:  # the server ended, and the process still runs
        code = 1
        with contextlib.suppress(ProcessLookupError):
            _wait(os.pidfd_open(child))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _connect(address: str, descriptors: Sequence[int]) -> tuple[int, int]:
    """Have the server at ``address`` fork, as CPython's ``ForkServer.connect_to_new_process`` does."""
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
    """A script, as its forked process gets it, pickled."""

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
        """Run the script, unless imports may have read other variables than it has; ends the process, in which
        CPython's server calls this."""
        with _exiting():
            os.close(parent_sentinel)
            *streams, answer = forkserver._forkserver._inherited_fds  # type: ignore[attr-defined]
            if differing := sorted(self._differing()):
                os.write(answer, f"it has another {', '.join(differing)}".encode())
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
        """Become what the process is that asked."""
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin = open(0, closefd=False)  # CPython's server has another
        tracker: Any = resource_tracker._resource_tracker
        os.close(tracker._fd)
        tracker._fd = None
        os.environ.clear()
        os.environ.update(self.environment)
        tempfile.tempdir = None  # that of the variables
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
        """Return the variables that what is imported here may have read otherwise."""
        names = {name for name in {*self.environment, *_environment} if name.startswith(READ_BY_IMPORTS)}
        return {
            name for name in names.difference(SET_BY_IMPORTS) if self.environment.get(name) != _environment.get(name)
        }


_inherited: list[ForkServer] = []


def inherited() -> ForkServer | None:
    """Return the server that this process got with its start, if any (:func:`command`)."""
    return _inherited[0] if _inherited else None


def end_with(process: int) -> None:
    """End this process when ``process`` ends, whatever ended it, from now on."""
    threading.Thread(target=_end_with, args=(process,), name=f"end with {process}", daemon=True).start()


def end_with_server() -> None:
    """End this forked process when its server ends. The kernel does it, also for a process that is stopped (SIGSTOP),
    whose threads notice nothing."""
    server = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)


def _end_with(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        _wait(os.pidfd_open(process))
    os.kill(os.getpid(), signal.SIGKILL)


def _wait(handle: int, timeout_ms: int | None = None) -> bool:
    """Wait for the end of a process; ``handle``: of ``pidfd_open``. Returns whether it ended."""
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(timeout_ms))


def _exit_code(ended: SystemExit) -> int:
    """Return what the interpreter makes of it."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1
