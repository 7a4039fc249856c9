"""The processes of an engine: forking them on CPU, their log, and detection of stopped ones. Does not import vLLM.

Stopped processes: a step may take longer than the deadline for a stopped process (SIGSTOP), but the kernel reports
that state. CPU time does not tell a long step from a hang, because workers sleep while a GPU computes.

Forking: vLLM starts a core process, which starts workers, and each imports torch and vLLM, which takes 15 s of a core.
On CPU, a fork server imports once, and all cores and workers are forked from it. It is the server that this process
came from (``fork_server.py``), or a new one that imports in parallel with this process. A forked process has the
environment and output of the process that requested it, and ends when that process or the server ends.

On GPUs, vLLM spawns its processes, because CUDA and NCCL may not survive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import importlib
import io
import os
import re
import sys
import tempfile
import threading
from collections.abc import Awaitable, Iterator, Sequence
from importlib.util import find_spec
from multiprocessing import context, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from pathlib import Path
from typing import Any

import psutil

from skyrl_megatron import fork_server
from skyrl_megatron.errors import EngineGoneError
from skyrl_megatron.fork_server import ForkServer, socket_folder

_starting = threading.Lock()
_PREFIX = re.compile(r"^(\([^)]*\)\s*)?((INFO|WARNING|ERROR|DEBUG)\s+\d\d-\d\d [\d:]+\s+\[[^\]]*\]\s*)?")
_TELLING = re.compile(
    r"^[\w.]*(Error|Exception|Exit|Fault)\b.*:|out of memory|.*died unexpectedly|Killed|Segmentation fault|Aborted"
)
_POINTING = re.compile(r"Executor failed|[Ss]ee (root cause|stack trace)|Engine core initialization failed")
"""Errors of vLLM that only point to an earlier one."""
SOME_OUTPUT = 1 << 16
"""Bytes to write to check for a full disk. Fewer may still fit into the last page of a file."""


@contextlib.contextmanager
def child_output(path: Path) -> Iterator[None]:
    """Redirect the output of processes started in the block to ``path``. During the block, also of this process.

    File descriptors belong to the whole process, so blocks of several threads are serialized.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _starting, path.open("ab") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, original in zip((1, 2), saved, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


def last_errors(path: Path, count: int = 4) -> list[str]:
    """Return the last few error lines of an engine's output, each once, without vLLM's prefixes.

    Errors that only point to an earlier one are left out if possible. If there is no cause, check whether the disk is
    full: a process that cannot write its output ends.
    """
    try:
        text = path.read_bytes()[-200_000:].decode(errors="replace")
    except OSError:
        text = ""
    errors: dict[str, None] = {}
    for line in text.splitlines():
        words = _PREFIX.sub("", line).strip()
        if _TELLING.search(words):
            errors.pop(words, None)
            errors[words] = None
    causes = [words for words in errors if not _POINTING.search(words)]
    if not causes and (refused := _refused(path.parent)):
        return [f"its output cannot be written to {path}: {refused}"]
    return (causes or list(errors))[-count:]


def _refused(folder: Path) -> str:
    """Return why ``folder`` is not writable; "" if it is."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(SOME_OUTPUT))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


LOOK_S = 1.0
LOOKS = 5
"""Consecutive polls at which a process must be stopped. They are counted, not timed, because this process may have
been stopped together with the engine."""


async def unless_stopped[T](answer: Awaitable[T], processes: Sequence[psutil.Process]) -> T:
    """Await an engine's answer. Raises EngineGoneError if one of its processes stays stopped."""
    pending = asyncio.ensure_future(answer)
    stopped: dict[int, int] = {}
    try:
        while not (await asyncio.wait([pending], timeout=LOOK_S))[0]:
            stopped = {process: stopped.get(process, 0) + 1 for process in _stopped(processes)}
            if LOOKS in stopped.values():
                process = max(stopped, key=lambda pid: stopped[pid])
                raise EngineGoneError(f"hangs: process {process} is stopped, for {LOOKS * LOOK_S:g} s so far")
        return await pending
    finally:
        pending.cancel()


def _stopped(processes: Sequence[psutil.Process]) -> list[int]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                found.append(process.pid)
    return found


IMPORTED = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.registry",
    "skyrl_megatron.inference.vllm.compat",
]
_LIBRARIES = (
    ("vllm", "libs/libtcmalloc*.so*"),
    ("torch", "../torch.libs/libgomp*.so*"),
    ("torch", "lib/libgomp*.so*"),
)
"""(package, pattern) of shared libraries that vLLM's CPU processes must load before all others."""

_server: ForkServer | None = None


def start_server() -> ForkServer:
    """Start the fork server unless it runs. Return immediately; the server imports in the background."""
    global _server
    resource_tracker.ensure_running()  # of this process, which its engines share
    if _server is None:
        _server = fork_server.inherited()
    if _server is None or not _server.is_alive():
        environment = os.environ | {"LD_PRELOAD": libraries(), "OMP_NUM_THREADS": omp_threads()}
        _server = ForkServer.start(f"{__name__}:import_all", environment)
    return _server


def import_all() -> None:
    """Import the modules of engine cores and workers. Without vLLM, the run's engines are a plugin's: nothing."""
    for module in IMPORTED if find_spec("vllm") else ():
        importlib.import_module(module)


def omp_threads() -> str:
    """Return ``OMP_NUM_THREADS`` for engine processes. OpenMP reads it only when it is loaded."""
    return os.environ.get("OMP_NUM_THREADS", "1")


class _Popen(popen_forkserver.Popen):
    """Starts a process by a request to the fork server."""

    _fds: list[int]

    def _launch(self, process: context.ForkServerProcess) -> None:
        """Send preparation and process, pickled, to a newly forked process, as CPython's ``popen_forkserver`` does."""
        pickled = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), pickled)
            reduction.dump(process, pickled)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, writer = start_server().connect(self._fds)
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(writer), self.sentinel))  # type: ignore[attr-defined]
        with open(writer, "wb") as file:
            file.write(pickled.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class EngineProcess(context.ForkServerProcess):
    """A process that the fork server forks, with the environment and output of its starter."""

    _Popen = _Popen

    def start(self) -> None:
        self._server_address = start_server().address
        self._environment = dict(os.environ)
        self._output = _Output()
        self._starter = os.getpid()
        super().start()
        del self._output

    def run(self) -> None:
        global _server
        self._output.take()  # first, so that later errors are in the engine's log
        fork_server.end_with(self._starter)
        fork_server.end_with_server()
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update({n: value for n, value in self._environment.items() if os.environ.get(n) != value})
        tempfile.tempdir = None  # read it again from the variables
        # this process's workers are forked from the same server
        _server = ForkServer(self._server_address, forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
        super().run()


class OwnedProcess(context.SpawnProcess):
    """A spawned process that ends with its starter. vLLM's engine cores would wait for requests forever."""

    def start(self) -> None:
        self._starter = os.getpid()
        super().start()

    def run(self) -> None:
        fork_server.end_with(self._starter)
        super().run()


class OwnedContext(context.SpawnContext):
    """The multiprocessing context of engine cores on GPUs."""

    Process = OwnedProcess


class EngineContext(context.ForkServerContext):
    """The multiprocessing context of engine cores and workers on CPU, in place of vLLM's ``get_mp_context``."""

    Process = EngineProcess


TEMPORARY_CHARACTERS = 60
"""Limit of the folder's path. Linux limits socket paths to 107 characters, including what vLLM appends."""


def use_private_temporary_folder() -> str:
    """Create a private folder and make it the temporary folder of this process and its children.

    The caller removes it, because vLLM and multiprocessing leave sockets and folders when they are killed. Returns its
    path. Raises LaunchError as :func:`~skyrl_megatron.fork_server.socket_folder` does.
    """
    usual = tempfile.gettempdir()
    folder = socket_folder("skyrl-engine-", TEMPORARY_CHARACTERS)
    # keep torch's cache of compiled kernels in its usual folder
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(usual, f"torchinductor_{getpass.getuser()}"))
    os.environ["TMPDIR"], tempfile.tempdir = folder, folder
    return folder


class _Output:
    """Standard output and error of this process, pickled for another process."""

    def __init__(self, descriptors: Any = None) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> Any:
        return _Output, ([reduction.DupFd(1), reduction.DupFd(2)],)

    def take(self) -> None:
        """Use them as standard output and error of this process."""
        for number, descriptor in zip((1, 2), self._descriptors, strict=True):
            received = descriptor.detach()
            os.dup2(received, number)
            os.close(received)


def libraries() -> str:
    """Return ``LD_PRELOAD`` with vLLM's libraries, as far as they exist, before its current value."""
    already = os.environ.get("LD_PRELOAD", "")
    found: dict[str, str] = {}
    for package, pattern in _LIBRARIES:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or ():
            for path in sorted(Path(folder).glob(pattern)):
                found.setdefault(path.name.split(".")[0].split("-")[0], str(path.resolve()))
    return ":".join([*(path for name, path in found.items() if name not in already), *filter(None, [already])])
