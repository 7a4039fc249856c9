"""Which address and which ports a host's Ray listens on."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from skyrl_megatron.errors import LaunchError

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
