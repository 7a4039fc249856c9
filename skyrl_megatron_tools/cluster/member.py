"""The process on each host of a cluster: it runs Ray, and on host 0 also the command that uses the cluster."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from skyrl_megatron import device
from skyrl_megatron import progress as start_times
from skyrl_megatron.errors import LaunchError, SkyRLMegatronError, set_up
from skyrl_megatron.interrupts import replace_handlers, restore_handlers
from skyrl_megatron.workers.runtime_env import LOOPBACK
from skyrl_megatron_tools.cluster.hosts import (
    LOOPBACK_ALONE,
    ClusterFolder,
    HeadAddress,
    Member,
    Ports,
    address_of,
    interface_of,
    require_rails,
)

POLL_S = 0.5


@contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM, SIGHUP and SIGUSR1 in a list, instead of ending this process."""
    signals: list[int] = []

    def handle(number: int, frame: object) -> None:
        signals.append(number)

    before = replace_handlers(handle) | {signal.SIGUSR1: signal.signal(signal.SIGUSR1, handle)}
    try:
        yield signals
    finally:
        restore_handlers(before)


def run_until_signalled(command: Sequence[str], environment: Mapping[str, str], requests: Callable[[], int]) -> int:
    """Run ``command`` and return its exit code (128 + N after signal N). Send it a SIGINT for each of ``requests()``.

    A run saves its last step at the first SIGINT and ends immediately at the second. It has a separate session, so
    that it gets a terminal's Ctrl-C only once.
    """
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        passed = 0
        while process.poll() is None:
            for _ in range(requests() - passed):
                process.send_signal(signal.SIGINT)
                passed += 1
            time.sleep(POLL_S)
    finally:
        process.kill()
        process.wait()
    code = process.returncode
    return code if code >= 0 else 128 - code


END_S = 15.0
"""How long Ray's processes may take to end before they are killed."""
SLOTS_WITHOUT_GPUS = 16
"""Least number of logical CPUs of a host without GPUs: each rank and engine needs one, even on few cores."""
WARNING = re.compile(r"\[\S+ \S+ [IW] \d+ \d+\]")
"""Start of an info or warning line of Ray's C++ processes."""
_PR_SET_PDEATHSIG = 1


class RayNode:
    """``ray start --block`` on this host. Its processes end with this process, even if it is killed."""

    def __init__(
        self,
        folder: ClusterFolder,
        number: int,
        address: str,
        ports: Ports,
        head: HeadAddress | None,
        extra: Sequence[str] = (),
        rails: Sequence[str] = (),
    ) -> None:
        """``head``: the head to join; None: this host is the head. ``extra``: options of ``ray start``. ``rails``:
        InfiniBand devices for NCCL."""
        self.log = folder.log(number)
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={address}", *ports.options(head=head is None)]
        if head is None:
            # no autoscaler and no dashboard are needed; each saves 2 s of imports, next to 15 s for the agents
            command += ["--head", "--include-dashboard=false", "--no-monitor", f"--temp-dir={temp_folder(ports)}"]
        else:
            command += [f"--address={head.ray_address}"]
        if not device.has_cuda() and not any(option.startswith("--num-cpus") for option in extra):
            command += [f"--num-cpus={max(os.cpu_count() or 1, SLOTS_WITHOUT_GPUS)}"]
        variables = folder.environment() | network_variables(address, rails)
        variables.pop("RAY_ADDRESS", None)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *extra],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                start_new_session=True,  # signals of SLURM or a terminal to the process group must not reach Ray
                preexec_fn=_end_with_parent,
            )
        self._seen: dict[int, psutil.Process] = {}

    def failed(self) -> str | None:
        """Return why Ray has ended, None while it runs."""
        self._collect_children()
        if self.process.poll() is None:
            return None
        errors = last_errors(self.log.read_text(errors="replace"))
        return f"Ray ended with exit code {self.process.returncode}: {errors} (see {self.log})"

    def end(self) -> None:
        """End the Ray processes that this object started on this host."""
        self._collect_children()
        self.process.terminate()
        deadline = time.monotonic() + END_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        left = [process for process in self._seen.values() if process.is_running()]
        _, left = psutil.wait_procs(left, max(deadline - time.monotonic(), 1.0))
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()

    def _collect_children(self) -> None:
        """Remember all descendants. A worker whose parent has ended cannot be found later."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(process.pid, process)


def last_errors(log: str) -> str:
    """Return the last two error lines of a Ray log, without warnings, or else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if ("rror" in line or "ailed" in line) and not WARNING.match(line)]
    return " ".join(errors[-2:] or lines[-1:])


def temp_folder(ports: Ports) -> str:
    """Return Ray's folder on each host. It is short because a socket path may have at most 107 characters."""
    return f"/tmp/ray-{os.getuid()}-{ports.first}"


def network_variables(address: str, rails: Sequence[str] = ()) -> dict[str, str]:
    """Return environment variables that bind Ray, gloo and NCCL to ``address`` and ``rails``, unless already set."""
    if address.startswith("127."):
        return {LOOPBACK_ALONE: "0"}
    interface = interface_of(address)
    found = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface) if interface else {}
    found |= {"NCCL_IB_HCA": f"={','.join(rails)}"} if rails else {}  # "=": exact names, not prefixes
    return {name: value for name, value in found.items() if value and name not in os.environ}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def require_ray() -> None:
    """Raise LaunchError if Ray is not installed in this environment."""
    if not Path(sys.executable).with_name("ray").exists():
        raise LaunchError(
            f"Ray is not installed in {sys.prefix}: run {set_up()} on this host, or share the environment"
        )


PROGRESS_S = 20.0
ENDED_BEFORE = "the cluster ended before this host could join"
STARTED = "Ray runtime started"
TOO_SLOW = "timed out during startup"
LEAVE_S = 600.0
"""How long a host that got a signal waits for the run on host 0 to save and end."""


@dataclass(frozen=True)
class HostConfig:
    """The configuration of one host: its ``number`` of ``hosts``, the cluster's folder and ports, and Ray's options.

    ``within_s``: deadline for all hosts to join. ``extra``: options of ``ray start``. ``rails``: InfiniBand devices
    for NCCL; empty: NCCL's choice.
    """

    number: int
    hosts: int
    folder: Path
    ports: Ports
    interface: str | None = None
    within_s: float = 300.0
    extra: tuple[str, ...] = ()
    rails: tuple[str, ...] = ()


def run_member(host: HostConfig, command: Sequence[str] = ()) -> int:
    """Run this host until the cluster ends. Return the exit code.

    Host 0 runs ``command`` when all hosts have joined, and the cluster ends with it. Without a command, the cluster
    runs until it is stopped. SIGINT, SIGTERM, SIGUSR1 and the folder's file ``save`` ask the command to save and end:
    each is passed on as SIGINT. Without a command they stop the cluster. The other hosts ignore such signals for a
    while, because the run needs them until it has saved.

    Raises LaunchError if this host cannot join, or if another one has not joined after ``host.within_s``.
    """
    if not host.folder.is_dir():
        raise LaunchError(
            f"{socket.gethostname()}: {host.folder} does not exist on this host; all hosts must share the folder: "
            "start in a folder on a shared file system, or give one with --dir"
        )
    require_ray()
    require_rails(host.rails)
    folder = ClusterFolder(host.folder)
    if host.number == 0 and not (host.folder / "token").exists():
        folder = ClusterFolder.make(host.folder)
    if folder.ended:
        raise LaunchError(f"{socket.gethostname()}: {ENDED_BEFORE}")
    with collected_signals() as signals:
        try:
            if host.number > 0:
                return _other_host(host, folder, signals)
            return _first_host(host, folder, command, signals)
        except SkyRLMegatronError as error:
            folder.fail(host.number, str(error))
            raise
        finally:
            folder.leave(host.number)
            if host.number == 0:
                folder.end()


def _first_host(host: HostConfig, folder: ClusterFolder, command: Sequence[str], signals: list[int]) -> int:
    address = LOOPBACK if host.hosts == 1 and host.interface is None else address_of(host.interface)
    host.ports.require_free(address)
    _join(folder, 0, address)
    node = _start(host, folder, address, None, signals)
    try:
        folder.announce(HeadAddress(address, host.ports.first, socket.gethostname()))
        _join(folder, 0, address, ready=True)
        _await_members(host, folder, node, signals)
        return _run(command, folder, node, signals) if command else _stay(folder, node, signals)
    finally:
        folder.end()
        node.end()


def _other_host(host: HostConfig, folder: ClusterFolder, signals: list[int]) -> int:
    def announced() -> bool:
        if signals or folder.ended:
            raise LaunchError("; ".join(folder.failures()) or ENDED_BEFORE)
        return folder.head() is not None

    _wait(announced, host.within_s, "host 0 to listen")
    head = folder.head()
    assert head is not None
    address = address_of(host.interface)
    host.ports.require_free(address)
    _require_reachable(head)
    _join(folder, host.number, address)
    node = _start(host, folder, address, head, signals)
    try:
        _join(folder, host.number, address, ready=True)
        return _stay(folder, node, signals, patience_s=LEAVE_S)
    finally:
        node.end()


def _join(folder: ClusterFolder, number: int, address: str, *, ready: bool = False) -> None:
    created = psutil.Process().create_time()
    folder.join(Member(number, socket.gethostname(), address, os.getpid(), created, ready))


def _start(
    host: HostConfig, folder: ClusterFolder, address: str, head: HeadAddress | None, signals: list[int]
) -> RayNode:
    """Start Ray on this host and wait for it. Ray's own timeout is 30 s, so on a busy host it is retried until the
    deadline."""
    ends = time.monotonic() + host.within_s

    def started() -> bool:
        if (why := node.failed()) is not None:
            raise LaunchError(f"{socket.gethostname()}: {why}")
        if signals or folder.ended:
            raise KeyboardInterrupt
        return STARTED in node.log.read_text(errors="replace")

    while True:
        node = RayNode(folder, host.number, address, host.ports, head, host.extra, host.rails)
        try:
            _wait(started, ends - time.monotonic(), f"Ray to start on {socket.gethostname()} (see {node.log})")
            return node
        except BaseException as error:
            node.end()
            if TOO_SLOW not in str(error) or time.monotonic() > ends:
                raise


def _await_members(host: HostConfig, folder: ClusterFolder, node: RayNode, signals: list[int]) -> None:
    def all_there() -> bool:
        if failures := folder.failures():
            raise LaunchError("; ".join(failures))
        if (why := node.failed()) is not None:
            raise LaunchError(f"{socket.gethostname()}: {why}")
        if signals:
            raise KeyboardInterrupt
        return len(folder.ready()) == host.hosts

    def missing() -> str:
        there = folder.ready()
        numbers = sorted(set(range(host.hosts)) - {member.number for member in there})
        return (
            f"all hosts: {len(there)} of {host.hosts} have joined ({', '.join(member.host for member in there)}); "
            f"missing: number {', '.join(map(str, numbers))}"
        )

    _wait(all_there, host.within_s, missing)
    hosts = ", ".join(f"{member.host} ({member.address})" for member in folder.ready())
    print(f"cluster: {host.hosts} {'host' if host.hosts == 1 else 'hosts'}: {hosts}", flush=True)


def _stay(folder: ClusterFolder, node: RayNode, signals: list[int], patience_s: float = 0.0) -> int:
    """Wait until the cluster ends, at most ``patience_s`` after a signal."""
    ends = None
    while not folder.ended:
        if (why := node.failed()) is not None:
            raise LaunchError(f"{socket.gethostname()}: {why}")
        if signals and ends is None:
            ends = time.monotonic() + patience_s
        if ends is not None and time.monotonic() >= ends:
            break
        time.sleep(POLL_S)
    return 0


def _run(command: Sequence[str], folder: ClusterFolder, node: RayNode, signals: list[int]) -> int:
    """Run the command, then print the failures of hosts. Return the command's exit code."""
    environment = folder.environment() | start_times.marks_for_command("cluster")
    code = run_until_signalled(command, environment, lambda: len(signals) + folder.asked_to_save)
    own = node.failed()
    for why in [*folder.failures(), *([own] if own else [])]:
        print(why, file=sys.stderr)
    return code


def _require_reachable(head: HeadAddress) -> None:
    try:
        socket.create_connection((head.address, head.port), timeout=10).close()
    except OSError as error:
        raise LaunchError(
            f"{socket.gethostname()}: cannot connect to host 0, {head.host}, at {head.ray_address} ({error}); check "
            "firewall and routing, or choose another interface with --interface"
        ) from error


def _wait(done: Callable[[], bool], within_s: float, what: str | Callable[[], str]) -> None:
    """Wait until ``done()``, and print progress every 20 s. Raises LaunchError after ``within_s``."""
    started = printed = time.monotonic()

    def description() -> str:
        return what if isinstance(what, str) else what()

    while not done():
        now = time.monotonic()
        if now - started > within_s:
            raise LaunchError(f"waited {within_s:.0f} s for {description()}; give more time with --within")
        if now - printed >= PROGRESS_S:
            printed = now
            print(f"… waiting for {description()}: {now - started:.0f} s so far", flush=True)
        time.sleep(POLL_S)
