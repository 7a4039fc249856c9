"""The processes of an engine: forked from one that has imported vLLM (CPU), their log, and whether one is stopped.

A step may take longer than an engine that hangs should be waited for. A process that is stopped answers nobody, and
the kernel says so; it is never a long step. Processor time does not tell the two apart: workers sleep while a GPU
computes (``torch.cuda.Event(blocking=True)``), as they do in a deadlock. Imports no vLLM.

vLLM starts an engine as a core process, which starts workers, and each of them imports torch and vLLM anew: 15 s of a
core a process. Here a fork server imports once, and every core and worker of all engines that a process starts is
forked from it: the server that came with the process (``workers/forked.py``), or else one that imports while the
process does so too. A forked process has the environment and the output of the one that asked for it, and ends when
that one or the server does, whatever ended it.

On GPUs vLLM keeps its own way: CUDA and NCCL set themselves up in ways that a fork may not survive. Imports no vLLM.
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
from skyrl_megatron.fork_server import ForkServer

_starting = threading.Lock()
_PREFIX = re.compile(r"^(\([^)]*\)\s*)?((INFO|WARNING|ERROR|DEBUG)\s+\d\d-\d\d [\d:]+\s+\[[^\]]*\]\s*)?")
_TELLING = re.compile(
    r"^[\w.]*(Error|Exception|Exit|Fault)\b.*:|out of memory|.*died unexpectedly|Killed|Segmentation fault|Aborted"
)
_POINTING = re.compile(r"Executor failed|[Ss]ee (root cause|stack trace)|Engine core initialization failed")
"""What vLLM raises because of something that was said before."""
SOME_OUTPUT = 1 << 16
"""Bytes that a disk must take to be no cause: some are left of a page of a file, also where it is full."""


@contextlib.contextmanager
def child_output(path: Path) -> Iterator[None]:
    """Let processes started within the block write what they print to ``path``, as this process does meanwhile.

    File descriptors belong to the whole process: blocks of several threads take turns.
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
    """Return the last few lines of an engine's output that name an error, each once, without vLLM's prefixes.

    Those that only point to another are left out if there is another. Where none says why, the disk may: a process
    ends that cannot write its output.
    """
    try:
        text = path.read_bytes()[-200_000:].decode(errors="replace")
    except OSError:
        text = ""
    found: dict[str, None] = {}
    for line in text.splitlines():
        words = _PREFIX.sub("", line).strip()
        if _TELLING.search(words):
            found.pop(words, None)
            found[words] = None
    causes = [words for words in found if not _POINTING.search(words)]
    if not causes and (refused := _refused(path.parent)):
        return [f"its output cannot be written to {path}: {refused}"]
    return (causes or list(found))[-count:]


def _refused(folder: Path) -> str:
    """Return why nothing can be written in ``folder``; "" if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(SOME_OUTPUT))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


LOOK_S = 1.0
LOOKS = 5
"""At which a process was stopped, one after the other. They are counted, not timed: this process may have been stopped
together with the engine, and the looks in between did not take place then."""


async def unless_stopped[T](answer: Awaitable[T], processes: Sequence[psutil.Process]) -> T:
    """Await what an engine answers. Raises EngineGoneError once a process of it stays stopped."""
    asked = asyncio.ensure_future(answer)
    stopped: dict[int, int] = {}
    try:
        while not (await asyncio.wait([asked], timeout=LOOK_S))[0]:
            stopped = {process: stopped.get(process, 0) + 1 for process in _stopped(processes)}
            if LOOKS in stopped.values():
                process = max(stopped, key=lambda each: stopped[each])
                raise EngineGoneError(f"hangs: process {process} is stopped, for {LOOKS * LOOK_S:g} s so far")
        return await asked
    finally:
        asked.cancel()


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
"""Shared libraries that vLLM's CPU processes want loaded before all others: package, pattern."""

_server: ForkServer | None = None


def start_server() -> ForkServer:
    """Start the server unless it runs. Returns at once; it imports while this process goes on."""
    global _server
    resource_tracker.ensure_running()  # of this process, which its engines share
    if _server is None:
        _server = fork_server.inherited()
    if _server is None or not _server.is_alive():
        environment = os.environ | {"LD_PRELOAD": libraries(), "OMP_NUM_THREADS": omp_threads()}
        _server = ForkServer.start(f"{__name__}:import_all", environment)
    return _server


def import_all() -> None:
    """Import what engine cores and workers need."""
    for module in IMPORTED:
        importlib.import_module(module)


def omp_threads() -> str:
    """Return ``OMP_NUM_THREADS`` of engine processes: OpenMP reads it when it is loaded, and never again."""
    return os.environ.get("OMP_NUM_THREADS", "1")


class _Popen(popen_forkserver.Popen):
    """A request to our server."""

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
    """A process that the server forks, as if it had been spawned by the one that starts it."""

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
        fork_server.end_with(self._starter)
        fork_server.end_with_server()
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update({n: value for n, value in self._environment.items() if os.environ.get(n) != value})
        tempfile.tempdir = None  # that of the variables
        self._output.take()
        # workers, which this process starts, come from the same server
        _server = ForkServer(self._server_address, forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
        super().run()


class OwnedProcess(context.SpawnProcess):
    """A spawned process that ends when the one that starts it does, whatever ended it: vLLM's engine cores, with whom
    their workers end, would wait for requests for ever."""

    def start(self) -> None:
        self._starter = os.getpid()
        super().start()

    def run(self) -> None:
        fork_server.end_with(self._starter)
        super().run()


class OwnedContext(context.SpawnContext):
    """The context of engine cores where none are forked."""

    Process = OwnedProcess


class EngineContext(context.ForkServerContext):
    """The context that ``vllm.utils.system_utils.get_mp_context`` returns on CPU."""

    Process = EngineProcess


TEMPORARY_CHARACTERS = 60
"""Longest name of a folder for sockets: what vLLM and multiprocessing add must fit into the 107 that Linux takes."""


def own_temporary_folder() -> str | None:
    """Make a folder that only this user can enter, and make it the temporary one of this process and all that it
    starts: vLLM and multiprocessing leave sockets and folders when they are killed. Returns its path, which the caller
    has removed; None where its name would be too long for a socket's, and nothing changes."""
    usual = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="skyrl-engine-")
    if len(folder) > TEMPORARY_CHARACTERS:
        os.rmdir(folder)
        return None
    # what is compiled is kept, where torch keeps it without us
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(usual, f"torchinductor_{getpass.getuser()}"))
    os.environ["TMPDIR"], tempfile.tempdir = folder, folder
    return folder


class _Output:
    """Standard output and error of this process, on their way to another."""

    def __init__(self, descriptors: Any = None) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> Any:
        return _Output, ([reduction.DupFd(1), reduction.DupFd(2)],)

    def take(self) -> None:
        """Make them this process's own."""
        for number, descriptor in zip((1, 2), self._descriptors, strict=True):
            received = descriptor.detach()
            os.dup2(received, number)
            os.close(received)


def libraries() -> str:
    """Return ``LD_PRELOAD`` with vLLM's libraries, as far as they are there, before what is in it already."""
    already = os.environ.get("LD_PRELOAD", "")
    found: dict[str, str] = {}
    for package, pattern in _LIBRARIES:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or ():
            for path in sorted(Path(folder).glob(pattern)):
                found.setdefault(path.name.split(".")[0].split("-")[0], str(path.resolve()))
    return ":".join([*(path for name, path in found.items() if name not in already), *filter(None, [already])])
