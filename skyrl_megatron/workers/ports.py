"""Free ports of this machine."""

from __future__ import annotations

import socket

from skyrl_megatron.errors import LaunchError

LOOPBACK = "127.0.0.1"


def free_port(host: str = LOOPBACK) -> int:
    """Return a TCP port of ``host``, an address of this machine, that nobody listens on. Raises LaunchError when there
    is none, or the address is not this machine's."""
    with take_port(host) as holder:
        return int(holder.getsockname()[1])


def take_port(host: str = LOOPBACK) -> socket.socket:
    """Return a socket that holds a free TCP port of ``host``, so that nobody else gets it before it is listened on.
    Raises LaunchError as :func:`free_port` does."""
    holder = socket.socket()
    try:
        holder.bind((host, 0))
    except OSError as error:
        holder.close()
        raise LaunchError(
            f"no free port on {host}: {error}; end processes that hold ports (ss -ltn), or widen "
            "net.ipv4.ip_local_port_range; an address that is not this machine's is Ray's idea of it: start Ray with "
            "--node-ip-address"
        ) from error
    return holder
