"""Free ports of this machine."""

from __future__ import annotations

import socket

from skyrl_megatron.errors import LaunchError

LOOPBACK = "127.0.0.1"


def free_port(host: str = LOOPBACK) -> int:
    """Return a TCP port of ``host``, an address of this machine, that nobody listens on. Raises LaunchError when there
    is none, or the address is not this machine's."""
    try:
        with socket.socket() as listener:
            listener.bind((host, 0))
            return int(listener.getsockname()[1])
    except OSError as error:
        raise LaunchError(
            f"no free port on {host}: {error}; end processes that hold ports (ss -ltn), or widen "
            "net.ipv4.ip_local_port_range; an address that is not this machine's is Ray's idea of it: start Ray with "
            "--node-ip-address"
        ) from error
