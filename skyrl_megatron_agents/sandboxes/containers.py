"""Sandboxes in containers of Docker or Podman, by the HTTP API of their Unix socket: the provider ``docker``.

The socket is that of ``DOCKER_HOST``, of Docker, or of Podman's service (``podman system service``). A container has
no network, no capability, a read-only root file system and writable folders in memory, which count as its disk. Its
process 1 reads from this process and ends with it, so no container outlives the run, however that ends. The image
needs ``sh``, ``tar``, ``timeout`` and ``mkdir``, as those of Debian and Alpine (BusyBox) have.

Used of the API (v1.41 and later, https://docs.docker.com/reference/api/engine/): containers create, attach, start,
kill, inspect, delete, commit; exec; images inspect, create; build; version.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from skyrl_megatron.errors import CommandStartError, SandboxError, SandboxLimitError
from skyrl_megatron_agents.sandboxes.dockerfile import fingerprint, is_context, packed
from skyrl_megatron_agents.sandboxes.process_one import Kept
from skyrl_megatron_agents.sandboxes.sandbox import (
    AGENT_HOME,
    SETUP,
    TESTS,
    WORKSPACE,
    CommandResult,
    SandboxSpec,
    command_environment,
    pack,
)
from skyrl_megatron_agents.sandboxes.sandbox_store import RunRecords

CALL_S = 60.0
"""Time in seconds of one call of the API."""
PULL_S = 1800.0
"""Time in seconds to pull an image, and for a setup command."""
COPY_S = 120.0
GRACE_S = 30.0
REMOVALS = 5
"""How often a container is removed that the engine does not remove at once."""
REMOVE_S = 0.5
"""Time in seconds between two of these."""
ROOT = "0:0"
USER = "1000:1000"
"""User and group of the commands."""
OWNED = (WORKSPACE, "/tmp", AGENT_HOME)
BUILDS = "skyrl-megatron-build"
"""Repository of images made from build contexts."""
SETUPS = "skyrl-megatron-setup"
"""Repository of images with installed dependencies."""
LABEL = "skyrl-megatron.run"


def find_socket() -> Path | None:
    """Return the Unix socket of an engine, or None."""
    docker_host = os.environ.get("DOCKER_HOST", "")
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    paths = [
        "/var/run/docker.sock",
        "/run/podman/podman.sock",
        f"{runtime}/docker.sock",
        f"{runtime}/podman/podman.sock",
    ]
    if docker_host:
        paths = [docker_host.removeprefix("unix://")]
    return next((Path(path) for path in paths if Path(path).is_socket()), None)


class ContainerProvider:
    """Starts containers of one engine on this machine.

    ``engine``: the engine's Unix socket; None: :func:`find_socket`. ``home``: folder of records.
    """

    def __init__(self, *, engine: Path | None = None, home: Path | None = None) -> None:
        self._engine = engine or find_socket()
        self._records = RunRecords("docker", home)
        self._alive: set[ContainerSandbox] = set()
        self._making: dict[str, asyncio.Lock] = {}
        self._version = ""

    def problem(self) -> str | None:
        """Ask the engine for its version, and return why it does not answer, or None."""
        fix = "start Docker or `podman system service`, or set DOCKER_HOST=unix:///path/of/its.sock"
        if self._engine is None:
            return f"no Unix socket of Docker or Podman: {fix}"
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(self._engine)), timeout=CALL_S) as client:
                self._version = client.get("http://engine/version").raise_for_status().json()["ApiVersion"]
        except (httpx.HTTPError, KeyError, ValueError) as error:
            return f"{self._engine} does not answer ({type(error).__name__}: {error}): {fix}"
        return None

    async def start(self, spec: SandboxSpec) -> ContainerSandbox:
        """Start a container. Raises SandboxError."""
        image = await self._image(spec.image)
        if spec.setup:
            image = await self._dependencies(spec, image)
        sandbox = await self._start(spec, image, self._host_settings(spec), ROOT if spec.folders else USER)
        for folder in spec.folders:
            await sandbox.put(pack({}), folder)
        return sandbox

    async def _start(self, spec: SandboxSpec, image: str, host: Mapping[str, Any], user: str) -> ContainerSandbox:
        name = f"skyrl-sandbox-{secrets.token_hex(6)}"
        seconds = int(spec.limits.lifetime_s) + 1
        settings = {
            "Image": image,
            "Entrypoint": ["/bin/sh", "-c"],
            # Its processes are root's; if the end of a command of root kills them, it begins again.
            "Cmd": [f"while timeout {seconds} cat >/dev/null; [ $? -eq 137 ]; do :; done; exit 0"],
            "User": "0:0",
            "Env": [],
            "WorkingDir": "/",
            "OpenStdin": True,
            "StdinOnce": True,
            "AttachStdin": True,
            "Labels": {LABEL: self._records.id},
            "HostConfig": dict(host),
        }
        self._records.write(name, {"engine": str(self._engine)})
        sandbox = ContainerSandbox(name, spec, self, user)
        self._alive.add(sandbox)
        try:
            await self.call("POST", f"/containers/create?name={name}", settings)
            await sandbox.begin()
            if spec.relay:
                process = (await self.call("GET", f"/containers/{name}/json"))["State"]["Pid"]
                sandbox.listener = await asyncio.to_thread(_listen_inside, process)
        except BaseException as error:
            await asyncio.shield(sandbox.stop())
            if isinstance(error, OSError):
                raise SandboxError(f"container {name} did not start: {error}") from error
            raise
        return sandbox

    def _host_settings(self, spec: SandboxSpec) -> dict[str, Any]:
        limits = spec.limits
        memory = limits.memory + limits.disk  # files are in memory
        owned = f"rw,exec,nosuid,nodev,size={limits.disk},mode=1777"
        files = {**dict.fromkeys(OWNED, owned), TESTS: f"rw,exec,nosuid,nodev,size={limits.disk},mode=755"}
        return {
            "NetworkMode": "none",
            "ReadonlyRootfs": not spec.folders,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(limits.cpus * 1e9),
            "PidsLimit": limits.processes + 8,
            "ShmSize": min(limits.disk, 64 << 20),
            "Tmpfs": {"/tmp": owned} if spec.folders else files,
            "Binds": [f"{Path(outside).absolute()}:{inside}:ro" for inside, outside in spec.mounts.items()],
            "IpcMode": "private",
        }

    async def _image(self, image: str) -> str:
        """Return the id of an image, pulled if it is not here."""
        if is_context(image):
            return await self._build(Path(image).expanduser())
        if image == "host":
            raise SandboxError("provider docker has no image 'host': name one, such as docker.io/library/python:3.12")
        async with self._making.setdefault(image, asyncio.Lock()):
            if (image_id := await self._image_id(image)) is None:
                name, _, tag = image.rpartition(":") if ":" in image.rpartition("/")[2] else (image, "", "latest")
                await self.call("POST", f"/images/create?fromImage={name}&tag={tag}", timeout_s=PULL_S)
                image_id = await self._image_id(image)
        if image_id is None:
            raise SandboxError(f"image {image!r} is not here and cannot be pulled: build or load it")
        return image_id

    async def _build(self, context: Path) -> str:
        """Return the image of a build context, with the engine's default network. The engine keeps it."""
        tag = f"{BUILDS}:{(await asyncio.to_thread(fingerprint, context))[:32]}"
        async with self._making.setdefault(tag, asyncio.Lock()):
            if (image_id := await self._image_id(tag)) is None:
                archive = await asyncio.to_thread(packed, context)
                await self.call("POST", f"/build?t={tag}&rm=true&forcerm=true", archive, timeout_s=PULL_S)
                image_id = await self._image_id(tag)
        if image_id is None:
            raise SandboxError(f"the engine did not keep the image of {context} as {tag}: is its disk full?")
        return image_id

    async def _image_id(self, image: str) -> str | None:
        found = await self.call("GET", f"/images/{image}/json", missing=True)
        return None if found is None else str(found["Id"])

    async def _dependencies(self, spec: SandboxSpec, image: str) -> str:
        """Return the image with what the setup command installs, as root, with the engine's default network."""
        key = hashlib.sha256(
            json.dumps([image, spec.setup, sorted(map(str, spec.mounts.items()))]).encode()
        ).hexdigest()
        tag = f"{SETUPS}:{key[:32]}"
        async with self._making.setdefault(tag, asyncio.Lock()):
            if (image_id := await self._image_id(tag)) is not None:
                return image_id
            host = {"Binds": self._host_settings(spec)["Binds"]}
            sandbox = await self._start(spec, image, host, ROOT)
            try:
                command = ["sh", "-euc", f"mkdir -p {SETUP}; cd {SETUP}; {spec.setup}"]
                done = await sandbox.run(command, timeout_s=PULL_S, folder="/")
                if done.exit_code or done.timed_out:
                    said = done.stderr.decode(errors="replace")[-2000:]
                    raise SandboxError(f"setup command ended with exit code {done.exit_code}: {said}")
                repository, _, label = tag.partition(":")
                where = f"container={sandbox.name}&repo={repository}&tag={label}"
                await self.call("POST", f"/commit?{where}", {}, timeout_s=PULL_S)
            finally:
                await sandbox.stop()
        if (image_id := await self._image_id(tag)) is None:
            raise SandboxError(f"the engine did not keep the image of a setup command as {tag}: is its disk full?")
        return image_id

    async def call(
        self,
        verb: str,
        path: str,
        content: Mapping[str, Any] | bytes | None = None,
        *,
        timeout_s: float = CALL_S,
        missing: bool = False,
    ) -> Any:
        """Call the API and return the decoded reply, or None if it has no content or, with ``missing``, for 404.
        ``content``: JSON, or a tar archive.

        Raises SandboxError with the engine's message.
        """
        try:
            transport = httpx.AsyncHTTPTransport(uds=str(self._engine))
            async with httpx.AsyncClient(transport=transport, timeout=timeout_s) as client:
                body: dict[str, Any] = {"json": content}
                if isinstance(content, bytes):
                    body = {"content": content, "headers": {"content-type": "application/x-tar"}}
                reply = await client.request(verb, f"http://engine/v{await self._api()}{path}", **body)
        except httpx.HTTPError as error:
            raise SandboxError(f"the container engine failed: {type(error).__name__}: {error}") from error
        if missing and reply.status_code == httpx.codes.NOT_FOUND:
            return None
        if reply.is_error:
            raise SandboxError(f"the container engine refused {verb} {path}: {reply.text.strip()[:1000]}")
        if not reply.headers.get("content-type", "").startswith("application/json") or not reply.content:
            return None
        lines = reply.text.strip().splitlines()
        if len(lines) > 1 or path.startswith(("/images/create", "/build")):  # the progress of a pull, a line each
            failed = [json.loads(line)["error"] for line in lines if '"error"' in line]
            if failed:
                raise SandboxError(f"the container engine failed at {path}: {failed[0]}")
            return None
        return json.loads(reply.text)

    async def _api(self) -> str:
        if not self._version and (reason := await asyncio.to_thread(self.problem)):
            raise SandboxError(f"the container engine failed: {reason}")
        return self._version

    async def hijack(self, path: str, content: Mapping[str, Any] | None = None) -> Streams:
        """Post, and return the connection, which is a raw stream from then on. Raises SandboxError."""
        body = json.dumps(content or {}).encode()
        head = (
            f"POST /v{await self._api()}{path} HTTP/1.1\r\nHost: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(CALL_S):
                reader, writer = await asyncio.open_unix_connection(str(self._engine))
                writer.write(head.encode() + body)
                answer = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
                if answer.split()[1] in ("101", "200"):
                    return reader, writer
                said = (await reader.read(1000)).decode(errors="replace")
                writer.close()
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError) as error:
            raise SandboxError(f"the container engine failed: {type(error).__name__}: {error}") from error
        raise SandboxError(f"the container engine refused {path}: {said.strip()}")

    def forget(self, sandbox: ContainerSandbox) -> None:
        """Remove a container that is gone from the records."""
        self._alive.discard(sandbox)
        self._records.remove(sandbox.name)

    def reap(self) -> int:
        """Remove the containers of ended runs, and return their number."""
        removed = 0
        with self._records.left() as records:
            for path, record in records:
                try:
                    transport = httpx.HTTPTransport(uds=record.get("engine", str(self._engine)))
                    with httpx.Client(transport=transport, timeout=CALL_S) as client:
                        for _ in range(REMOVALS):  # an engine refuses while the container ends by itself
                            gone = client.delete(f"http://engine/containers/{path.name}?force=true&v=true")
                            if not gone.is_error or gone.status_code == httpx.codes.NOT_FOUND:
                                path.unlink(missing_ok=True)
                                removed += not gone.is_error
                                break
                            time.sleep(REMOVE_S)
                except httpx.HTTPError:
                    continue  # another engine, which does not run
        return removed

    async def close(self) -> None:
        """Stop all containers."""
        await asyncio.gather(*(sandbox.stop() for sandbox in tuple(self._alive)))
        self._records.close()


type Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ContainerSandbox:
    """A container: see :class:`skyrl_megatron_agents.sandboxes.sandbox.Sandbox`."""

    def __init__(self, name: str, spec: SandboxSpec, provider: ContainerProvider, user: str) -> None:
        self.name = name
        self.listener: socket.socket | None = None
        self._spec, self._provider, self._user = spec, provider, user
        self._held: Streams | None = None
        self._stopped = False

    async def begin(self) -> None:
        """Hold the container's stdin open, and start it."""
        self._held = await self._provider.hijack(f"/containers/{self.name}/attach?stream=1&stdin=1")
        await self._provider.call("POST", f"/containers/{self.name}/start")

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        folder: str = WORKSPACE,
        stdin: bytes = b"",
    ) -> CommandResult:
        """Run a command as the unprivileged user. Raises SandboxError if it cannot be executed."""
        result = await self._execute(
            command, timeout_s, self._user, folder, stdin, environment, self._spec.limits.output
        )
        if result.exit_code in (126, 127) and b"OCI runtime" in result.stdout + result.stderr:
            said = (result.stdout + result.stderr).decode(errors="replace").strip()
            raise CommandStartError(f"run in a sandbox failed: {said[:500]}")
        return result

    async def put(self, archive: bytes, folder: str = WORKSPACE) -> None:
        """Unpack a tar archive into a folder. Raises SandboxError."""
        folder = os.path.normpath(folder)
        owned = any(Path(folder).is_relative_to(writable) for writable in OWNED)
        if not self._spec.folders and not owned and not Path(folder).is_relative_to(TESTS):
            raise SandboxError(f"{folder} of a container is read-only: put files into {WORKSPACE} or {TESTS}")
        command = ["sh", "-c", 'mkdir -p "$0" && tar -x -o -f - -C "$0"', folder]
        self._copied(
            await self._execute(command, COPY_S, USER if owned and not self._spec.folders else ROOT, "/", archive),
            f"writing to {folder}",
        )

    async def get(self, folder: str = WORKSPACE) -> bytes:
        """Return a folder as a tar archive. Raises SandboxError, and SandboxLimitError if it is too large."""
        limit = self._spec.limits.archive
        pack = 'cd "$0" || exit; chmod -R u+rwX . 2>/dev/null; tar -c -f - .'
        result = await self._execute(["sh", "-c", pack, folder], COPY_S, self._user, "/", kept=2 * limit)
        if len(result.stdout) > limit:
            raise SandboxLimitError(f"{folder} of a sandbox has more than {limit:,} bytes: raise limits.archive")
        self._copied(result, f"reading {folder}")
        # The first entry is the folder, which is another user's: who unpacks the archive could not set its mode.
        has_folder_entry = result.stdout[:100].rstrip(b"\0") in (b"./", b".")
        return result.stdout[512:] if has_folder_entry else result.stdout

    def _copied(self, result: CommandResult, what: str) -> None:
        if result.timed_out or result.exit_code:
            why = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
            raise SandboxError(f"{what} in a sandbox {why}: {result.stderr.decode(errors='replace')[:500]}")

    async def _execute(
        self,
        command: Sequence[str],
        timeout_s: float,
        user: str,
        folder: str,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        kept: int = 1 << 20,
    ) -> CommandResult:
        """Run a command to its end or its time limit, and end whatever it started."""
        began = time.monotonic()
        try:
            identity, streams = await self._begin(command, user, folder, environment)
            out, err = Kept(kept), Kept(self._spec.limits.output)
            timed_out = False
            try:
                async with asyncio.timeout(timeout_s):
                    await _exchange(streams, stdin, out, err)
            except TimeoutError:
                timed_out = True
            finally:
                streams[1].transport.abort()
            await self._end_all()
            exit_code = 128 + 9 if timed_out else await self._exit_code(identity)
        except asyncio.CancelledError:
            await asyncio.shield(self.stop())
            raise
        return CommandResult(
            exit_code=exit_code,
            stdout=out.value(),
            stderr=err.value(),
            timed_out=timed_out,
            out_of_memory=exit_code == 128 + 9 and not timed_out,
            truncated=out.truncated or err.truncated,
            seconds=time.monotonic() - began,
        )

    async def _begin(
        self, command: Sequence[str], user: str, folder: str, environment: Mapping[str, str] | None
    ) -> tuple[str, Streams]:
        if self._stopped:
            raise SandboxError(f"sandbox {self.name} is stopped")
        variables = command_environment(environment)
        kept = {"PATH", "HOME", "USER", "LOGNAME"} - set(environment or {}) if self._spec.folders else ()
        asked = {
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            "Cmd": list(command),
            "Env": [f"{name}={value}" for name, value in variables.items() if name not in kept],
            "User": user,
            "WorkingDir": folder,
        }
        made = await self._provider.call("POST", f"/containers/{self.name}/exec", asked)
        return made["Id"], await self._provider.hijack(f"/exec/{made['Id']}/start", {"Detach": False, "Tty": False})

    async def _end_all(self) -> None:
        """Kill what the agent's user runs. If that cannot start, kill the container."""
        try:
            async with asyncio.timeout(GRACE_S):
                identity, streams = await self._begin(
                    ["sh", "-c", "kill -9 -1"], self._user if self._spec.folders else USER, "/", None
                )
                said = Kept(1000)
                await _exchange(streams, b"", said, said)
                streams[1].transport.abort()
                # 1: there was nothing to kill. Others: the engine could not start it, or not follow it.
                if (exit_code := await self._exit_code(identity)) not in (0, 1):
                    raise SandboxError(f"exit code {exit_code}: {said.value().decode(errors='replace').strip()}")
        except (TimeoutError, SandboxError) as error:
            await self.stop()
            raise SandboxLimitError(f"processes of sandbox {self.name} could not be ended: {error}") from error

    async def _exit_code(self, identity: str) -> int:
        deadline = time.monotonic() + GRACE_S
        while (state := await self._provider.call("GET", f"/exec/{identity}/json"))["Running"]:
            if time.monotonic() > deadline:
                raise SandboxError(f"a command of sandbox {self.name} closed its output and did not end")
            await asyncio.sleep(0.02)
        return int(state["ExitCode"])

    async def stop(self) -> None:
        """Remove the container with all its processes and files."""
        self._stopped = True
        if self.listener is not None:
            self.listener.close()
        if self._held is not None:
            self._held[1].transport.abort()
        for _ in range(REMOVALS):
            with contextlib.suppress(SandboxError):
                await self._provider.call("DELETE", f"/containers/{self.name}?force=true&v=true", missing=True)
                self._provider.forget(self)
                return
            await asyncio.sleep(REMOVE_S)  # a later run removes what could not be removed here


async def _exchange(streams: Streams, stdin: bytes, out: Kept, err: Kept) -> None:
    """Write stdin and read the two output streams to their end (frames of eight bytes: stream, 0, 0, 0, length)."""
    reader, writer = streams

    async def feed() -> None:
        with contextlib.suppress(OSError):
            writer.write(stdin)
            await writer.drain()
            writer.write_eof()

    feeding = asyncio.create_task(feed())
    try:
        while True:
            head = await reader.readexactly(8)
            data = await reader.readexactly(int.from_bytes(head[4:], "big"))
            (err if head[0] == 2 else out).add(data)
    except asyncio.IncompleteReadError:
        return
    except OSError as error:
        raise SandboxError(f"the container engine closed a command's output: {error}") from error
    finally:
        feeding.cancel()


def _listen_inside(process: int) -> socket.socket:
    """Return a socket that listens on loopback in the network namespace of a process. Raises SandboxError."""
    made: list[socket.socket | OSError] = []

    def enter() -> None:  # a thread of its own, as it stays in the other namespace
        try:
            with open(f"/proc/{process}/ns/net") as namespace:
                os.setns(namespace.fileno(), os.CLONE_NEWNET)
            made.append(socket.create_server(("127.0.0.1", 0), backlog=128))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=enter, name="listener of a sandbox")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise SandboxError(
            f"the network of a container cannot be entered ({made[0]}): run as root with the engine on this machine, "
            "or use provider namespaces"
        )
    return made[0]
