"""Free ports and enough memory: what a run takes from the machine, asked for before anything is started."""

from __future__ import annotations

import socket

import psutil

from skyrl_megatron.errors import LaunchError

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now. Raises LaunchError when there is none."""
    try:
        with socket.socket() as listener:
            listener.bind((LOOPBACK, 0))
            return int(listener.getsockname()[1])
    except OSError as error:
        raise LaunchError(
            f"no free port on {LOOPBACK}: {error}; end processes that hold ports (ss -ltn), or widen "
            "net.ipv4.ip_local_port_range"
        ) from error


def require_memory(gib: float, what: str) -> None:
    """Raise LaunchError unless ``gib`` GiB of memory are available for ``what``."""
    available = psutil.virtual_memory().available / 2**30
    if available < gib:
        raise LaunchError(
            f"memory: {available:.1f} GiB available, {what} needs about {gib:.1f} GiB: end other processes, or run it "
            "on a larger machine"
        )
