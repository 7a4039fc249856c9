"""Sandboxes of Linux namespaces, without a container engine: the provider ``namespaces``.

A sandbox is a process tree with its own users, mounts, processes, network interfaces, IPC and host name. Its writable
files are in memory and count as its disk. It has no network except a loopback interface. Control groups limit CPU
time, memory and processes where this process may make them (:mod:`.control_groups`); otherwise
limits per process, a count of processes per user namespace, and process 1, which measures memory 20 times a second.

As root, commands run as a user that exists nowhere else on this machine. Otherwise they have the id of the run's user
without any capability, and no file of that user is in the sandbox. Needs Linux 5.14 on x86_64 or aarch64.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_megatron.errors import CommandStartError, SandboxError, SandboxLimitError
from skyrl_megatron_agents.sandboxes import confine, control_groups, process_one
from skyrl_megatron_agents.sandboxes.control_groups import ControlGroups
from skyrl_megatron_agents.sandboxes.dockerfile import FIX, fingerprint, is_context, is_path, packed, read_dockerfile
from skyrl_megatron_agents.sandboxes.sandbox import (
    SETUP,
    WORKSPACE,
    CommandResult,
    Limits,
    SandboxSpec,
    command_environment,
    pack,
)
from skyrl_megatron_agents.sandboxes.sandbox_store import Layers, RunRecords, unpack_image

START_S = 30.0
"""Time in seconds that a sandbox has to start."""
COPY_S = 120.0
"""Time in seconds of one ``put`` or ``get``."""
SETUP_S = 1800.0
"""Time in seconds for the files of an image, and for a setup command."""
GRACE_S = 15.0
"""Time in seconds that process 1 has to report a command that reached its time limit."""
STOP_S = 5.0
STARTING = 4
"""Number of sandboxes that start or stop at once."""
OUTSIDE = 1_900_000_000
"""User id on this machine of a sandbox's commands, if the run is root. No user and no container engine has it."""
NEEDED = ("LD_LIBRARY_PATH",)
"""Variables without which this Python may not start. Commands do not get them."""
PROGRAM = "import sys; sys.path.append({root!r}); from skyrl_megatron_agents.sandboxes.process_one import main; main()"


class NamespaceProvider:
    """Starts sandboxes of namespaces on this machine.

    ``image`` of a sandbox is ``host`` (this machine's ``/usr`` and this Python, read-only), a folder with a root file
    system, a tar archive of one, which is unpacked once, or a folder with a Dockerfile, which is followed once on
    ``host``; each sandbox gets a copy of what it made. ``home``: folder of records and caches. ``grouped``:
    whether control groups are used; None: where possible.
    """

    def __init__(self, *, home: Path | None = None, grouped: bool | None = None) -> None:
        self._groups: ControlGroups | None = None if grouped is False else control_groups.find()
        if grouped and self._groups is None:
            raise SandboxError("this process cannot make control groups with limits of memory and processes: set none")
        self._mapped = os.geteuid() == 0
        self._records = RunRecords("namespaces", home)
        self._root = self._records.folder / ".root"
        self._root.mkdir()
        self._layers = Layers(home)
        self._threads = ThreadPoolExecutor(STARTING, thread_name_prefix="sandboxes")
        self._alive: set[NamespaceSandbox] = set()
        self._guard = threading.Lock()

    def problem(self) -> str | None:
        """Start and stop a sandbox, and return why that failed, or None."""
        if platform.machine() not in confine.ARCHITECTURES:
            return f"machine {platform.machine()}: use provider docker"
        try:
            self._start(SandboxSpec(limits=Limits(disk=1 << 20)), []).end()
        except SandboxError as error:
            return (
                f"{error}. User namespaces must be allowed (sysctl user.max_user_namespaces > 0, and "
                "kernel.apparmor_restrict_unprivileged_userns=0 where it exists); or use provider docker"
            )
        return None

    async def start(self, spec: SandboxSpec) -> NamespaceSandbox:
        """Start a sandbox. Raises SandboxError."""
        made = await self._followed(spec) if is_context(spec.image) else {}
        layers = await self._image(spec)
        if spec.setup:
            layers.insert(0, await self._dependencies(spec, list(layers)))
        sandbox = await self._start_in_thread(spec, layers)
        sandbox.owned = (*confine.WRITABLE, *made, *spec.folders)
        try:
            for folder in (*made, *spec.folders):
                archive = made.get(folder)
                await sandbox.put(archive.read_bytes() if archive else pack({}), folder)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def _followed(self, spec: SandboxSpec) -> dict[str, Path]:
        """Return what the Dockerfile of an image makes: an archive for each folder. Raises SandboxError."""
        context = Path(spec.image).expanduser().absolute()
        plan = await asyncio.to_thread(read_dockerfile, context)

        async def make(folder: Path) -> None:
            limits = replace(spec.limits, lifetime_s=2 * SETUP_S, archive=spec.limits.disk)
            sandbox = await self._start_in_thread(SandboxSpec(limits=limits), [])
            try:
                for owned in plan.folders:
                    await sandbox.put(pack({}), owned)
                for step in plan.steps:
                    if step.copied:
                        await sandbox.put(await asyncio.to_thread(packed, context, step.copied, step.mode), "/")
                        continue
                    command = ["sh", "-c", step.command]
                    done = await sandbox.run(
                        command, timeout_s=SETUP_S, folder=step.folder, environment=step.environment
                    )
                    if done.exit_code:
                        said = (done.stdout + done.stderr).decode(errors="replace").strip()[-500:]
                        raise SandboxError(
                            f"{step.where} ended with code {done.exit_code} in namespaces, which have no network and"
                            f" not the rights of root: {FIX}. It said: {said}"
                        )
                for number, owned in enumerate(plan.folders):
                    (folder / f"{number}.tar").write_bytes(await sandbox.get(owned))
            finally:
                await sandbox.stop()

        key = await asyncio.to_thread(fingerprint, context)
        archives = await self._layers.get(f"Dockerfile {key} {spec.limits}", make, 2 * SETUP_S)
        return {owned: archives / f"{number}.tar" for number, owned in enumerate(plan.folders)}

    async def _start_in_thread(self, spec: SandboxSpec, layers: Sequence[Path]) -> NamespaceSandbox:
        starting = self._threads.submit(self._start, spec, layers)
        try:
            return await asyncio.shield(asyncio.wrap_future(starting))
        except asyncio.CancelledError:
            starting.add_done_callback(_end_started)  # in the thread, as the event loop may end first
            raise

    async def _image(self, spec: SandboxSpec) -> list[Path]:
        """Return the layers of an image."""
        if _on_host(spec):
            return []
        path = Path(spec.image).expanduser().absolute()
        if is_path(spec.image) and path.is_dir():
            return [path]
        if not is_path(spec.image) or not path.is_file():
            why = "is neither host nor the path of a folder or an archive (/…, ./… or ~/…): give one of them"
            raise SandboxError(f"image {spec.image!r} {why}")

        async def make(folder: Path) -> None:
            await asyncio.to_thread(unpack_image, path, folder)

        written = path.stat()
        return [await self._layers.get(f"{path} {written.st_size} {written.st_mtime_ns}", make, SETUP_S)]

    async def _dependencies(self, spec: SandboxSpec, layers: list[Path]) -> Path:
        """Return the layer with what the setup command of ``spec`` installs."""

        async def make(folder: Path) -> None:
            sandbox = await self._start_in_thread(
                SandboxSpec(mounts=spec.mounts, limits=spec.limits, image=spec.image), layers
            )
            try:
                await sandbox.put(pack({}), SETUP)
                done = await sandbox.run(["sh", "-euc", spec.setup], timeout_s=SETUP_S, folder=SETUP)
                if done.exit_code:
                    said = done.stderr.decode(errors="replace")[-2000:]
                    raise SandboxError(f"setup command ended with exit code {done.exit_code}: {said}")
                archive = folder.with_suffix(".tar")
                archive.write_bytes(await sandbox.get(SETUP))
                await asyncio.to_thread(unpack_image, archive, folder.joinpath(*SETUP.split("/")))
                archive.unlink()
            finally:
                await sandbox.stop()

        mounts = sorted((inside, str(outside)) for inside, outside in spec.mounts.items())
        return await self._layers.get(
            json.dumps([spec.setup, spec.image, [*map(str, layers)], mounts]), make, 2 * SETUP_S
        )

    def _start(self, spec: SandboxSpec, layers: Sequence[Path]) -> NamespaceSandbox:
        """Start a sandbox from files that exist. Blocks for at most ``START_S`` seconds."""
        name = secrets.token_hex(6)
        folders = self._groups.folders(name) if self._groups else ()
        record: dict[str, Any] = {"control_groups": [str(folder) for folder in folders]}
        self._records.write(name, record)
        sandbox = None
        try:
            if self._groups:
                self._groups.make(name, spec.limits)
            here, there = socket.socketpair()
            with there:
                keeper = subprocess.Popen(
                    [sys.executable, "-ISB", "-c", PROGRAM.format(root=_source_root()), str(there.fileno())],
                    pass_fds=[there.fileno()],
                    env={name: os.environ[name] for name in NEEDED if name in os.environ},
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            sandbox = NamespaceSandbox(name, spec, self, keeper, here, folders)
            with self._guard:
                self._alive.add(sandbox)
            self._records.write(name, record | {"process": keeper.pid, "started": _start_time(keeper.pid)})
            sandbox.listener = self._handshake(sandbox, spec, layers)
        except (OSError, EOFError, SandboxError) as error:
            if sandbox is None:
                control_groups.remove(folders)
                self._records.remove(name)
            else:
                sandbox.end()
            raise SandboxError(f"a sandbox did not start: {error}") from error
        return sandbox

    def _handshake(self, sandbox: NamespaceSandbox, spec: SandboxSpec, layers: Sequence[Path]) -> socket.socket | None:
        """Send the settings, map the users and wait for process 1. Returns the socket that listens in the sandbox."""
        limits, channel = spec.limits, sandbox.channel
        mounts = {inside: str(Path(outside).absolute()) for inside, outside in spec.mounts.items()}
        if _on_host(spec) and not sys.base_prefix.startswith("/usr"):
            mounts.setdefault(sys.base_prefix, sys.base_prefix)
        settings = {
            "run": os.getpid(),
            "root": str(self._root),
            "host": _on_host(spec),
            "layers": [str(layer) for layer in layers],
            "mounts": mounts,
            "mapped": self._mapped,
            "counted": self._groups is not None,
            "control_groups": [str(folder) for folder in sandbox.folders],
            "relay": spec.relay,
            **{name: getattr(limits, name) for name in ("memory", "disk", "processes", "lifetime_s", "output")},
        }
        channel.settimeout(START_S)
        process_one.send(channel, json.dumps(settings).encode())
        message = process_one.receive(channel)
        if message == b"unshared":
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{sandbox.keeper.pid}/{kind}").write_text(f"0 0 1\n{confine.AGENT} {OUTSIDE} 1\n")
            process_one.send(channel, b"mapped")
            message = process_one.receive(channel)
        reply = json.loads(message)
        if "error" in reply:
            raise SandboxError(reply["error"])
        listener = None
        if spec.relay:
            _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
            listener = socket.socket(fileno=descriptors[0])
        channel.setblocking(False)
        return listener

    def forget(self, sandbox: NamespaceSandbox) -> None:
        """Remove a sandbox that ended from the records."""
        with self._guard:
            self._alive.discard(sandbox)
        self._records.remove(sandbox.name)

    async def in_thread(self, sandbox: NamespaceSandbox) -> None:
        """End a sandbox in a thread, also if the caller is cancelled."""
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, sandbox.end))

    def reap(self) -> int:
        """Kill and remove the sandboxes of ended runs, and return their number."""
        removed = 0
        with self._records.left() as records:
            for path, record in records:
                process = record.get("process")
                if process is not None and _start_time(process) == record.get("started"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                if control_groups.remove([Path(folder) for folder in record.get("control_groups", ())]):
                    path.unlink(missing_ok=True)
                    removed += 1
        return removed

    async def close(self) -> None:
        """Stop all sandboxes and delete the records."""
        with self._guard:
            alive = list(self._alive)
        await asyncio.gather(*(sandbox.stop() for sandbox in alive))
        self._threads.shutdown(wait=False)
        with contextlib.suppress(OSError):
            self._root.rmdir()
        self._records.close()


class NamespaceSandbox:
    """A sandbox of namespaces: see :class:`skyrl_megatron_agents.sandboxes.sandbox.Sandbox`."""

    def __init__(
        self,
        name: str,
        spec: SandboxSpec,
        provider: NamespaceProvider,
        keeper: subprocess.Popen[bytes],
        channel: socket.socket,
        folders: Sequence[Path],
    ) -> None:
        self.name, self.keeper, self.channel, self.folders = name, keeper, channel, folders
        self.listener: socket.socket | None = None
        self.owned: Sequence[str] = ()
        """Folders that its commands may write to. No other file is theirs."""
        self._spec, self._provider = spec, provider
        self._ends = time.monotonic() + spec.limits.lifetime_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._ended = threading.Lock()
        self._stopped = False

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        folder: str = WORKSPACE,
        stdin: bytes = b"",
    ) -> CommandResult:
        """Run a command as the unprivileged user of the sandbox. Raises SandboxError if it cannot be executed."""
        path = f"{sys.base_prefix}/bin" if _on_host(self._spec) else ""
        request = {
            "verb": "run",
            "command": list(command),
            "environment": command_environment(environment, path),
            "folder": folder,
            "limit": self._spec.limits.output,
        }
        return await self._request(request, stdin, timeout_s)

    async def put(self, archive: bytes, folder: str = WORKSPACE) -> None:
        """Unpack a tar archive into a folder. Raises SandboxError."""
        request = {"verb": "put", "folder": folder, "limit": self._spec.limits.output}
        self._copied(await self._request(request, archive, COPY_S), f"writing to {folder}")

    async def get(self, folder: str = WORKSPACE) -> bytes:
        """Return a folder as a tar archive. Raises SandboxError, and SandboxLimitError if it is too large."""
        limit = self._spec.limits.archive
        result = await self._request({"verb": "get", "folder": folder, "limit": 2 * limit}, b"", COPY_S)
        self._copied(result, f"reading {folder}")
        if len(result.stdout) > limit:
            raise SandboxLimitError(f"{folder} of a sandbox has more than {limit:,} bytes: raise limits.archive")
        return result.stdout

    def _copied(self, result: CommandResult, what: str) -> None:
        if result.timed_out or result.out_of_memory or result.exit_code:
            why = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
            raise SandboxError(f"{what} in a sandbox {why}: {result.stderr.decode(errors='replace')[:500]}")

    async def _request(self, request: Mapping[str, Any], payload: bytes, timeout_s: float) -> CommandResult:
        """Send a request to process 1 and wait for its reply. A request without a reply ends the sandbox."""
        if self._stopped:
            raise SandboxError(f"sandbox {self.name} is stopped")
        kills = control_groups.memory_kills(self.folders)
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                if self._streams is None:
                    self._streams = await asyncio.open_unix_connection(sock=self.channel)
                reader, writer = self._streams
                for frame in (json.dumps({**request, "timeout_s": timeout_s}).encode(), payload):
                    writer.write(len(frame).to_bytes(4, "big"))
                    writer.write(frame)
                    await writer.drain()
                frames = [await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big")) for _ in "123"]
        except TimeoutError:
            await self.stop()
            raise SandboxError(f"sandbox {self.name} did not report a command {GRACE_S:g} s after its limit") from None
        except (OSError, EOFError) as error:
            exhausted = self._exhausted(kills)
            await self.stop()
            if exhausted:
                raise SandboxLimitError(f"sandbox {self.name} reached {exhausted}") from error
            raise SandboxError(f"sandbox {self.name} ended by itself: {error or type(error).__name__}") from error
        except asyncio.CancelledError:
            await self.stop()
            raise
        reply = json.loads(frames[0])
        if reason := reply.pop("failed", None):
            kind = CommandStartError if reply.get("exit_code") == process_one.NOT_EXECUTED else SandboxError
            raise kind(f"{request['verb']} in a sandbox failed: {reason}")
        reply["out_of_memory"] |= control_groups.memory_kills(self.folders) > kills
        if reply["exit_code"] < 0:
            reply["exit_code"] = 128 - reply["exit_code"]
        return CommandResult(stdout=frames[1], stderr=frames[2], **reply)

    def _exhausted(self, kills: int) -> str:
        """Return the limit that ended the sandbox, or nothing."""
        if time.monotonic() >= self._ends:
            return f"its lifetime of {self._spec.limits.lifetime_s:g} s: raise limits.lifetime_s"
        if control_groups.memory_kills(self.folders) > kills:
            return f"its memory limit of {self._spec.limits.memory:,} bytes: raise limits.memory"
        return ""

    async def stop(self) -> None:
        """End every process of the sandbox. Its files were in memory and are gone with it."""
        self._stopped = True
        if self._streams is not None:
            self._streams[1].transport.abort()
        await self._provider.in_thread(self)

    def end(self) -> None:
        """End the sandbox, blocking. The end of the keeper is the end of all processes in the namespaces."""
        with self._ended:
            self._stopped = True
            if self.listener is not None:
                self.listener.close()
            with contextlib.suppress(OSError):
                self.channel.shutdown(socket.SHUT_RDWR)  # process 1 ends at the end of its file
            self.channel.close()
            try:
                self.keeper.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.keeper.kill()  # the kernel then kills process 1, and with it all others
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.keeper.wait(STOP_S)
            if control_groups.remove(self.folders):
                self._provider.forget(self)


def _on_host(spec: SandboxSpec) -> bool:
    """Return whether a sandbox has the system folders of this machine."""
    return spec.image == "host" or is_context(spec.image)


def _end_started(starting: Future[NamespaceSandbox]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().end()


def _source_root() -> str:
    return str(Path(__file__).parents[2])


def _start_time(process: int) -> int | None:
    """Return when a process started, in clock ticks since boot, which tells it from a later one with its id."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    return None
