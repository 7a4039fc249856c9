"""Sandboxes: what runs an agent's commands apart from the run, and what a provider of them must do.

A provider starts sandboxes; a sandbox has four verbs: start (by its provider), :meth:`~Sandbox.run`,
:meth:`~Sandbox.put` with :meth:`~Sandbox.get`, and :meth:`~Sandbox.stop`. Two providers are built in: ``namespaces``
(:mod:`.namespaces`) and ``docker`` (:mod:`.containers`). A plugin
registers others with :func:`skyrl_megatron.plugins.register_sandbox`.

A failure of a sandbox is a :class:`~skyrl_megatron.errors.SandboxError`, of a command that cannot be executed a
:class:`~skyrl_megatron.errors.CommandStartError`. One that ends badly, by itself or at a limit, is no error but a
:class:`CommandResult`.
"""

from __future__ import annotations

import io
import math
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from skyrl_megatron.errors import ConfigError, Problem, SandboxError

WORKSPACE = "/work"
"""Folder of the task's files in every sandbox. The agent owns it, and commands start in it."""
TESTS = "/tests"
"""Folder of the hidden tests. It does not exist where an agent runs."""
GIB = 1 << 30
PASSED = ("LANG", "LC_ALL", "TZ")
"""The only environment variables of the run that a command in a sandbox inherits. None of them holds a credential."""
SETUP = "/opt/setup"
"""Folder of installed dependencies. The agent cannot change it."""
AGENT_HOME = "/home/agent"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one sandbox.

    ``cpus``: cores, may be a fraction. ``memory``: bytes of all processes together. ``disk``: bytes of all files that
    are written. ``processes``: processes and threads. ``lifetime_s``: seconds from the start to the forced end.
    ``output``: bytes of stdout and of stderr that are kept from one command. ``archive``: bytes that one ``get``
    returns.
    """

    cpus: float = 1.0
    memory: int = GIB
    disk: int = GIB
    processes: int = 256
    lifetime_s: float = 3600.0
    output: int = 1 << 20
    archive: int = 64 << 20

    def __post_init__(self) -> None:
        """Raise ConfigError with every limit that is not a positive, finite number."""
        names = ("cpus", "memory", "disk", "processes", "lifetime_s", "output", "archive")
        wrong = [name for name in names if not 0 < getattr(self, name) < math.inf]
        if wrong:
            fix = "set it to a positive, finite number"
            raise ConfigError([Problem(f"limits.{name}", getattr(self, name), fix) for name in wrong])


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox consists of.

    ``image``: the provider's name of its files; ``host`` for ``namespaces`` is the system folders of this machine,
    read-only. ``setup``: a shell command that installs dependencies into ``/opt/setup``, whose ``bin`` is in ``PATH``.
    It runs once, with ``mounts``; what it writes there is cached for all sandboxes with the same image, mounts and
    command. ``mounts``: folders of this machine by their place in the sandbox, read-only. ``relay``: opens a port on
    the sandbox's loopback interface (:attr:`Sandbox.listener`), the only way out. ``trajectory``: a name for logs.

    An image that is a folder with a ``Dockerfile`` is a build context: ``docker`` builds it, ``namespaces`` follow it
    on this machine's files (:mod:`.dockerfile`). ``folders``: folders that the agent owns
    besides its own. A container with any of them is as its image is: commands run as its root, without capabilities,
    and may write everywhere, so that ``limits.disk`` holds for ``/tmp`` only.
    """

    image: str = "host"
    setup: str = ""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    relay: bool = False
    trajectory: str = ""
    folders: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended.

    ``exit_code``: as in a shell, 128 + N after signal N. ``timed_out``: it reached its time limit and was killed with
    all its descendants. ``out_of_memory``: the memory limit ended at least one of its processes. ``truncated``: more
    output was written than is kept; the middle is lost. ``seconds``: duration.
    """

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: bool = False
    seconds: float = 0.0


@runtime_checkable
class Sandbox(Protocol):
    """A started sandbox. Calls are not concurrent, except :meth:`stop`. Each raises SandboxError if the sandbox
    failed."""

    name: str
    listener: Any
    """With :attr:`SandboxSpec.relay`: a listening TCP socket on the sandbox's loopback interface, which this process
    accepts on (:class:`skyrl_megatron_agents.sandboxes.relay.Relay`). Otherwise None."""

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        folder: str = WORKSPACE,
        stdin: bytes = b"",
    ) -> CommandResult:
        """Run a command as the unprivileged user of the sandbox.

        The environment is :func:`command_environment`, and nothing of the run's. No process of the command is left
        when this returns.
        """
        ...

    async def put(self, archive: bytes, folder: str = WORKSPACE) -> None:
        """Unpack a tar archive (:func:`pack`) into a folder, which is made if needed: :data:`WORKSPACE`,
        :data:`TESTS`, or one below them, ``/tmp``, the agent's home or :attr:`SandboxSpec.folders`."""
        ...

    async def get(self, folder: str = WORKSPACE) -> bytes:
        """Return a folder as a tar archive, with names relative to it. Do not unpack it on this machine: its names are
        the agent's. :func:`unpack` is safe."""
        ...

    async def stop(self) -> None:
        """End every process of the sandbox and delete its files. Never raises, may be called again."""
        ...


@runtime_checkable
class SandboxProvider(Protocol):
    """Starts sandboxes: see :func:`skyrl_megatron_agents.sandboxes.sandbox_queue.make_provider`."""

    def problem(self) -> str | None:
        """Return why this provider cannot run here and how to fix it, or None. Starts nothing that stays."""
        ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox. Raises SandboxError, also after a deadline of the provider. The queue makes it a
        SandboxStartError."""
        ...

    def reap(self) -> int:
        """Remove what runs that were killed left, and return the number of sandboxes removed."""
        ...

    async def close(self) -> None:
        """Stop all sandboxes of this provider and release what it holds."""
        ...


def command_environment(given: Mapping[str, str] | None = None, path: str = "") -> dict[str, str]:
    """Return the whole environment of a command in a sandbox: fixed values, :data:`PASSED` of the run's, and
    ``given``.

    ``path``: folders before the system's in ``PATH``, with colons.
    """
    system = f"{SETUP}/bin:/usr/local/bin:/usr/bin:/bin"
    fixed = {
        "PATH": f"{path}:{system}" if path else system,
        "HOME": AGENT_HOME,
        "USER": "agent",
        "LOGNAME": "agent",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    inherited = {name: os.environ[name] for name in PASSED if name in os.environ}
    return {**fixed, **inherited, **(given or {})}


def pack(files: Mapping[str, bytes | str], executable: Sequence[str] = ()) -> bytes:
    """Return files by relative path as a tar archive for :meth:`Sandbox.put`. Names in ``executable`` get mode 755."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755 if name in executable else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return written.getvalue()


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return the regular files of a tar archive by path, relative to its root. Links and devices are left out.

    Raises SandboxError if the archive is damaged.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            files = {entry.name: opened.extractfile(entry) for entry in opened.getmembers() if entry.isreg()}
            return {os.path.normpath(name): file.read() for name, file in files.items() if file is not None}
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise SandboxError(f"an archive of {len(archive):,} bytes from a sandbox is damaged: {error}") from error
