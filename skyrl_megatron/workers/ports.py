"""Free ports of this machine."""

from __future__ import annotations

import socket

from skyrl_megatron.errors import LaunchError

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on. Raises LaunchError when there is none."""
    try:
        with socket.socket() as listener:
            listener.bind((LOOPBACK, 0))
            return int(listener.getsockname()[1])
    except OSError as error:
        raise LaunchError(
            f"no free port on {LOOPBACK}: {error}; end processes that hold ports (ss -ltn), or widen "
            "net.ipv4.ip_local_port_range"
        ) from error
