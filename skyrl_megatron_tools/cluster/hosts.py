"""The hosts of a cluster: the folder they share, their addresses and ports, and how to reach them by ssh.

token               the cluster's secret, mode 0600
head.json           where the head listens; written once it does
members/NUMBER.json a host's processes, while they run
members/NUMBER.failed  why a host could not take part
save                the command is asked to save and end
ended               the cluster is over: members go
NUMBER.log          what Ray's processes of that host print
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
from skyrl_megatron.workers.processes import LOOPBACK

LOOPBACK_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, Ray believes in a loopback address, on any system; else it puts the machine's own in its place."""
OF_ANOTHER_RAY = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", LOOPBACK_ALONE)
"""Variables of a Ray on this host alone (``workers/__init__.py``), which a cluster's processes must not see."""


@dataclass(frozen=True)
class HeadAddress:
    """Where the head listens, and which Ray session is the cluster's."""

    address: str
    port: int
    host: str

    @property
    def ray_address(self) -> str:
        """What RAY_ADDRESS is set to."""
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Member:
    """A host's part of the cluster. ``created``: start time of ``process``, so that its number is never another's.
    ``ready``: its Ray has started."""

    number: int
    host: str
    address: str
    process: int
    created: float
    ready: bool = False


class ClusterFolder:
    """The files of one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def make(cls, path: Path) -> ClusterFolder:
        """Make the folder with a fresh token. Raises LaunchError when a cluster is there that did not end."""
        folder = cls(path)
        try:
            (path / "members").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"{path}: cannot be made ({error.strerror}); give a folder of yours with --dir"
            ) from error
        if folder.head() is not None and not folder.ended:
            raise LaunchError(
                f"{path}: a cluster is there already ({folder.head()}); end it with 'launch/ray_cluster.sh down --dir "
                f"{path}', or give this one another folder with --dir"
            )
        folder.clear()
        token = os.open(path / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(token, "w") as file:
            file.write(secrets.token_hex(32))
        return folder

    def clear(self) -> None:
        """Remove what an earlier cluster left here."""
        for name in ("token", "head.json", "save", "ended"):
            (self.path / name).unlink(missing_ok=True)
        for file in self._members("*"):
            file.unlink(missing_ok=True)

    def _members(self, pattern: str) -> list[Path]:
        return sorted((self.path / "members").glob(pattern))

    # ------------------------------------------------------------------ what is written
    def announce(self, head: HeadAddress) -> None:
        """Tell the other hosts where the head is."""
        write_whole(self.path / "head.json", asdict(head))

    def join(self, member: Member) -> None:
        """Record a host's processes."""
        write_whole(self.path / "members" / f"{member.number}.json", asdict(member))

    def leave(self, number: int) -> None:
        """Take the record of a host back: its processes have ended."""
        (self.path / "members" / f"{number}.json").unlink(missing_ok=True)

    def fail(self, number: int, why: str) -> None:
        """Tell the others why a host cannot take part."""
        write_whole(self.path / "members" / f"{number}.failed", {"why": why})

    def end(self) -> None:
        """Ask every member to go."""
        (self.path / "ended").touch()

    # ------------------------------------------------------------------ what is read
    @property
    def asked_to_save(self) -> bool:
        """Whether the command is asked to save and end; SLURM's own signals would reach Ray's processes too."""
        return (self.path / "save").exists()

    @property
    def ended(self) -> bool:
        """Whether members are asked to go."""
        return (self.path / "ended").exists()

    def head(self) -> HeadAddress | None:
        """Return where the head is, None before it listens."""
        try:
            return HeadAddress(**json.loads((self.path / "head.json").read_text()))
        except FileNotFoundError:
            return None

    def members(self) -> list[Member]:
        """List the hosts that take part or are about to, in order."""
        found = [Member(**json.loads(file.read_text())) for file in self._members("*.json")]
        return sorted(found, key=lambda member: member.number)

    def ready(self) -> list[Member]:
        """List the hosts whose Ray has started, in order."""
        return [member for member in self.members() if member.ready]

    def failures(self) -> list[str]:
        """List why hosts could not take part."""
        return [json.loads(file.read_text())["why"] for file in self._members("*.failed")]

    def log(self, number: int) -> Path:
        """Return the file of what Ray's processes of a host print."""
        return self.path / f"{number}.log"

    def variables(self) -> dict[str, str]:
        """Return the variables with which a process finds the cluster and shows its token. RAY_AUTH_TOKEN, which Ray
        would heed first, must not be set beside them."""
        head = self.head()
        found = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.path / "token")}
        if head is not None:
            found["RAY_ADDRESS"] = head.ray_address
            if head.address == LOOPBACK:
                found[LOOPBACK_ALONE] = "0"
        return found

    def environment(self) -> dict[str, str]:
        """Return this process's environment with :meth:`variables`."""
        return {name: value for name, value in os.environ.items() if name not in OF_ANOTHER_RAY} | self.variables()


def write_whole(file: Path, content: dict[str, Any]) -> None:
    """Write JSON so that a reader on any host sees all of it or nothing."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as part:
        json.dump(content, part)
        part.flush()
        os.fsync(part.fileno())
    os.replace(part.name, file)


FIRST_PORT, WINDOW, WINDOWS = 10000, 1000, 22
"""Ports of a cluster are a window of its own below 32768, where Linux begins to give ports to clients."""


INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Ports:
    """Ports of a cluster, the same on every host: ``first`` is the head's, the next nine are Ray's helpers', and the
    other 990 the workers'."""

    first: int

    @classmethod
    def of_job(cls, job: int) -> Ports:
        """Return the window of a SLURM job: jobs that share a host do not meet, unless 22 job numbers lie between."""
        return cls(FIRST_PORT + job % WINDOWS * WINDOW)

    def options(self, *, head: bool) -> list[str]:
        """Return the options of ``ray start``."""
        names = [
            "node-manager-port",
            "object-manager-port",
            "dashboard-agent-grpc-port",
            "dashboard-agent-listen-port",
        ]
        # the client server runs on the head alone, but every node refuses ports that meet its default, 10001
        names += ["runtime-env-agent-port", "metrics-export-port", "ray-client-server-port"]
        names += ["dashboard-port"] if head else []
        ports = [f"--{name}={self.first + 1 + number}" for number, name in enumerate(names)]
        workers = [f"--min-worker-port={self.first + 10}", f"--max-worker-port={self.first + WINDOW - 1}"]
        return ports + workers + ([f"--port={self.first}"] if head else [])

    def require_free(self, address: str) -> None:
        """Raise LaunchError when somebody listens on a port that Ray needs on ``address``."""
        for port in range(self.first, self.first + 10):
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    listener.bind((address, port))
                except OSError as error:
                    raise LaunchError(
                        f"{socket.gethostname()}: port {port} of {address} is in use ({error.strerror}), by a Ray "
                        f"perhaps (ss -ltnp 'sport = :{port}'); end it, or give this cluster other ports with --port"
                    ) from error


def address_of(interface: str | None) -> str:
    """Return this host's IPv4 address: that of ``interface``, else the one its own name stands for.

    Raises LaunchError when there is none that other hosts can reach.
    """
    host = socket.gethostname()
    known: dict[str, str] = {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family is socket.AF_INET
    }
    if interface is not None:
        if interface not in known:
            raise LaunchError(f"{host}: no interface {interface} with an IPv4 address; there are {_listed(known)}")
        return known[interface]
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "127.0.0.1"
    if address.startswith("127."):
        raise LaunchError(
            f"{host}: the host's name stands for {address}, which other hosts cannot reach; choose an interface with "
            f"--interface: {_listed(known)}"
        )
    return address


def interface_of(address: str) -> str | None:
    """Return the interface that has ``address``, which gloo and NCCL are to use."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return None


def require_rails(names: Sequence[str], listed: Path = INFINIBAND) -> None:
    """Raise LaunchError for an InfiniBand device (``mlx5_0``, or a port of it, ``mlx5_0:1``) that this host lacks."""
    there = sorted(each.name for each in listed.iterdir()) if listed.is_dir() else []
    for name in names:
        if name.partition(":")[0] not in there:
            raise LaunchError(
                f"{socket.gethostname()}: no InfiniBand device {name}; there are {', '.join(there) or 'none'}: choose "
                "among them with --rails"
            )


def _listed(known: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in known.items())


SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
REPOSITORY = Path(__file__).resolve().parents[2]


def read_hosts(file: Path) -> list[str]:
    """Return the hosts of a file: one a line, ``#`` begins a comment. Raises LaunchError when there are none."""
    try:
        lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    except OSError as error:
        raise LaunchError(f"--hosts {file}: {error.strerror}; give a file with a host name a line") from error
    hosts = [line for line in lines if line]
    if not hosts:
        raise LaunchError(f"--hosts {file}: names no host; write one a line")
    if twice := sorted({host for host in hosts if hosts.count(host) > 1}):
        raise LaunchError(f"--hosts {file}: {', '.join(twice)} is named twice; a host has one Ray")
    return hosts


def is_here(host: str) -> bool:
    """Return whether ``host`` is this one."""
    return host in ("localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().partition(".")[0])


def on_host(host: str, command: Sequence[str]) -> list[str]:
    """Return the command line that runs ``command`` on ``host``, from this folder, in this checkout."""
    if is_here(host):
        return list(command)
    words = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    return [*SSH, host, words]


def start_member(host: str, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a host's part in the background; it outlives this process. ``log``: what it prints."""
    command = [str(REPOSITORY / "launch/ray_cluster.sh"), "member", *arguments]
    with log.open("wb") as file:
        return subprocess.Popen(
            on_host(host, command), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def end_cluster(folder: ClusterFolder, within_s: float = 60.0) -> list[Member]:
    """Ask every member to end its processes; those on this host that do not are killed. Returns who is left."""
    folder.end()
    ends = time.monotonic() + within_s
    while folder.members() and time.monotonic() < ends:
        for member in folder.members():
            if is_here(member.host) and running(member) is None:
                folder.leave(member.number)  # it was killed: Ray's processes ended with it
        time.sleep(0.3)
    for member in folder.members():
        if is_here(member.host) and (process := running(member)):
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            folder.leave(member.number)
    return folder.members()


def await_end(started: Sequence[subprocess.Popen[bytes]], within_s: float = 60.0) -> None:
    """Wait for hosts' parts that had not joined yet: they find the cluster ended, and go. Kill those that do not."""
    ends = time.monotonic() + within_s
    for process in started:
        try:
            process.wait(max(ends - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def running(member: Member) -> psutil.Process | None:
    """Return the process of a member of this host, None when it has ended; its number may be another's by then."""
    try:
        process = psutil.Process(member.process)
        return process if abs(process.create_time() - member.created) < 1.0 else None
    except psutil.NoSuchProcess:
        return None


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else f"nothing was printed ({sys.executable})"
