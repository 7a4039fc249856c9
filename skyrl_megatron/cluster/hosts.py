"""Hosts that are reached by ssh, and this one: starting the cluster's part on each, and ending it again."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from skyrl_megatron.cluster.folder import ClusterFolder, Member
from skyrl_megatron.errors import LaunchError

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
