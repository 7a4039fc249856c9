"""The hosts of a cluster: their shared folder, their addresses and ports, and ssh.

Files in the shared folder:
token                  the cluster's secret, mode 0600
head.json              address of the head, written when it listens
members/NUMBER.json    a host's process, while it runs
members/NUMBER.failed  why a host could not join
save                   asks the command to save and end
ended                  asks all hosts to stop
NUMBER.log             output of a host's Ray processes
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from skyrl_megatron.errors import LaunchError
from skyrl_megatron.workers.runtime_env import LOOPBACK

LOOPBACK_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, Ray keeps a loopback address on any system. Otherwise it replaces it with the machine's own address."""
LOCAL_RAY_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", LOOPBACK_ALONE)
"""Variables of a local Ray (``workers/__init__.py``), which a cluster's processes must not inherit."""


@dataclass(frozen=True)
class HeadAddress:
    """The address of the head, and its host name."""

    address: str
    port: int
    host: str

    @property
    def ray_address(self) -> str:
        """The value for RAY_ADDRESS."""
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Member:
    """A host of the cluster.

    ``created``: start time of ``process``, in case its pid is reused. ``ready``: its Ray has started.
    """

    number: int
    host: str
    address: str
    process: int
    created: float
    ready: bool = False


class ClusterFolder:
    """The shared folder of one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def make(cls, path: Path) -> ClusterFolder:
        """Create the folder with a new token. Raises LaunchError if a running cluster uses it."""
        folder = cls(path)
        try:
            (path / "members").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"{path}: cannot be created ({error.strerror}); give a writable folder with --dir"
            ) from error
        if folder.head() is not None and not folder.ended:
            raise LaunchError(
                f"{path}: a cluster already uses this folder ({folder.head()}); stop it with 'skyrl-megatron cluster "
                f"down --dir {path}', or give another folder with --dir"
            )
        folder.clear()
        token = os.open(path / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(token, "w") as file:
            file.write(secrets.token_hex(32))
        return folder

    def clear(self) -> None:
        """Remove the files of an earlier cluster."""
        for name in ("token", "head.json", "save", "ended"):
            (self.path / name).unlink(missing_ok=True)
        for file in self._members("*"):
            file.unlink(missing_ok=True)

    def _members(self, pattern: str) -> list[Path]:
        return sorted((self.path / "members").glob(pattern))

    # ------------------------------------------------------------------ writing
    def announce(self, head: HeadAddress) -> None:
        """Publish the address of the head."""
        write_json_atomically(self.path / "head.json", asdict(head))

    def join(self, member: Member) -> None:
        """Record a host's process."""
        write_json_atomically(self.path / "members" / f"{member.number}.json", asdict(member))

    def leave(self, number: int) -> None:
        """Remove the record of a host whose processes have ended."""
        (self.path / "members" / f"{number}.json").unlink(missing_ok=True)

    def fail(self, number: int, why: str) -> None:
        """Record why a host cannot join."""
        write_json_atomically(self.path / "members" / f"{number}.failed", {"why": why})

    def end(self) -> None:
        """Ask every host to stop."""
        (self.path / "ended").touch()

    # ------------------------------------------------------------------ reading
    @property
    def asked_to_save(self) -> bool:
        """Whether the command must save and end. A signal from SLURM would reach Ray's processes too."""
        return (self.path / "save").exists()

    @property
    def ended(self) -> bool:
        """Whether all hosts must stop."""
        return (self.path / "ended").exists()

    def head(self) -> HeadAddress | None:
        """Return the address of the head, None before it listens."""
        try:
            return HeadAddress(**json.loads((self.path / "head.json").read_text()))
        except FileNotFoundError:
            return None

    def members(self) -> list[Member]:
        """List the hosts that have joined or are joining, by number."""
        found = [Member(**json.loads(file.read_text())) for file in self._members("*.json")]
        return sorted(found, key=lambda member: member.number)

    def ready(self) -> list[Member]:
        """List the hosts whose Ray has started, by number."""
        return [member for member in self.members() if member.ready]

    def failures(self) -> list[str]:
        """List why hosts could not join."""
        return [json.loads(file.read_text())["why"] for file in self._members("*.failed")]

    def log(self, number: int) -> Path:
        """Return the log file of a host's Ray processes."""
        return self.path / f"{number}.log"

    def variables(self) -> dict[str, str]:
        """Return the environment variables for a process that connects to the cluster with its token.

        RAY_AUTH_TOKEN must not be set as well: Ray would prefer it.
        """
        head = self.head()
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.path / "token")}
        if head is not None:
            environment["RAY_ADDRESS"] = head.ray_address
            if head.address == LOOPBACK:
                environment[LOOPBACK_ALONE] = "0"
        return environment

    def environment(self) -> dict[str, str]:
        """Return this process's environment with :meth:`variables`."""
        return {
            name: value for name, value in os.environ.items() if name not in LOCAL_RAY_VARIABLES
        } | self.variables()


def write_json_atomically(file: Path, content: dict[str, Any]) -> None:
    """Write JSON atomically, also for readers on other hosts."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as part:
        json.dump(content, part)
        part.flush()
        os.fsync(part.fileno())
    os.replace(part.name, file)


FIRST_PORT, WINDOW, WINDOWS = 10000, 1000, 22
"""Each cluster uses a window of 1000 ports below 32768, where Linux's range for clients starts."""


INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Ports:
    """Ports of a cluster, the same on every host: ``first`` for the head, 9 for Ray's services, 990 for workers."""

    first: int

    @classmethod
    def of_job(cls, job: int) -> Ports:
        """Return the window of a SLURM job. Jobs whose ids differ by a multiple of 22 have the same window."""
        return cls(FIRST_PORT + job % WINDOWS * WINDOW)

    def options(self, *, head: bool) -> list[str]:
        """Return the options of ``ray start``."""
        names = [
            "node-manager-port",
            "object-manager-port",
            "dashboard-agent-grpc-port",
            "dashboard-agent-listen-port",
        ]
        # only the head runs the client server, but every node rejects ports that overlap its default, 10001
        names += ["runtime-env-agent-port", "metrics-export-port", "ray-client-server-port"]
        names += ["dashboard-port"] if head else []
        ports = [f"--{name}={self.first + 1 + number}" for number, name in enumerate(names)]
        workers = [f"--min-worker-port={self.first + 10}", f"--max-worker-port={self.first + WINDOW - 1}"]
        return ports + workers + ([f"--port={self.first}"] if head else [])

    def require_free(self, address: str) -> None:
        """Raise LaunchError if a port that Ray needs on ``address`` is in use."""
        for port in range(self.first, self.first + 10):
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    listener.bind((address, port))
                except OSError as error:
                    raise LaunchError(
                        f"{socket.gethostname()}: port {port} of {address} is in use ({error.strerror}), perhaps by "
                        f"another Ray (ss -ltnp 'sport = :{port}'); end it, or give other ports with --port"
                    ) from error


def address_of(interface: str | None) -> str:
    """Return this host's IPv4 address: that of ``interface``, else the one that its host name resolves to.

    Raises LaunchError if other hosts cannot reach it.
    """
    host = socket.gethostname()
    addresses: dict[str, str] = {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family is socket.AF_INET
    }
    if interface is not None:
        if interface not in addresses:
            raise LaunchError(
                f"{host}: no interface {interface} with an IPv4 address; choose one with --interface: "
                f"{_listed(addresses)}"
            )
        return addresses[interface]
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "127.0.0.1"
    if address.startswith("127."):
        raise LaunchError(
            f"{host}: the host name resolves to {address}, which other hosts cannot reach; choose an interface with "
            f"--interface: {_listed(addresses)}"
        )
    return address


def interface_of(address: str) -> str | None:
    """Return the interface that has ``address``, for gloo and NCCL."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return None


def require_rails(names: Sequence[str], listed: Path = INFINIBAND) -> None:
    """Raise LaunchError if this host lacks an InfiniBand device (``mlx5_0``, or with its port, ``mlx5_0:1``)."""
    there = sorted(each.name for each in listed.iterdir()) if listed.is_dir() else []
    for name in names:
        if name.partition(":")[0] not in there:
            raise LaunchError(
                f"{socket.gethostname()}: no InfiniBand device {name}; choose with --rails from: "
                f"{', '.join(there) or 'none'}"
            )


def _listed(known: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in known.items())


SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "ray_cluster.sh"
THREADS = ("OMP_NUM_THREADS=1", "SKYRL_DEFAULT_THREADS=1")


def read_hosts(file: Path) -> list[str]:
    """Return the hosts of a file: one per line, ``#`` starts a comment. Raises LaunchError if there are none."""
    try:
        lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    except OSError as error:
        raise LaunchError(f"--hosts {file}: {error.strerror}; give a file with one host name per line") from error
    hosts = [line for line in lines if line]
    if not hosts:
        raise LaunchError(f"--hosts {file}: the file contains no host; write one per line")
    if twice := sorted({host for host in hosts if hosts.count(host) > 1}):
        raise LaunchError(f"--hosts {file}: {', '.join(twice)} is listed more than once; list each host once")
    return hosts


def is_here(host: str) -> bool:
    """Return whether ``host`` is this host."""
    return host in ("localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().partition(".")[0])


def on_host(host: str, command: Sequence[str]) -> list[str]:
    """Return the command line that runs ``command`` on ``host`` in the current working directory."""
    if is_here(host):
        return list(command)
    words = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    return [*SSH, host, words]


def start_member(host: str, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a host of the cluster in the background. It outlives this process and prints to ``log``."""
    installed = ["env", *THREADS, sys.executable, "-P", "-m", "skyrl_megatron_tools.cluster"]  # as the script does
    command = [*([str(SCRIPT)] if SCRIPT.exists() else installed), "member", *arguments]
    with log.open("wb") as file:
        return subprocess.Popen(
            on_host(host, command), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def end_cluster(folder: ClusterFolder, within_s: float = 60.0) -> list[Member]:
    """Ask every host to stop. After the deadline, kill processes on this host. Return the remaining members."""
    folder.end()
    ends = time.monotonic() + within_s
    while folder.members() and time.monotonic() < ends:
        for member in folder.members():
            if is_here(member.host) and running(member) is None:
                folder.leave(member.number)  # it was killed, and Ray's processes ended with it
        time.sleep(0.3)
    for member in folder.members():
        if is_here(member.host) and (process := running(member)):
            for child in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            folder.leave(member.number)
    return folder.members()


def await_end(started: Sequence[subprocess.Popen[bytes]], within_s: float = 60.0) -> None:
    """Wait until started hosts that have not joined see ``ended`` and stop. Kill them at the deadline."""
    ends = time.monotonic() + within_s
    for process in started:
        try:
            process.wait(max(ends - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def running(member: Member) -> psutil.Process | None:
    """Return the process of a member on this host, None if it has ended (also if its pid was reused)."""
    try:
        process = psutil.Process(member.process)
        return process if abs(process.create_time() - member.created) < 1.0 else None
    except psutil.NoSuchProcess:
        return None


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else f"no output ({sys.executable})"
