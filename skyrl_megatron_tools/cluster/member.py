"""What runs on each host: Ray's processes, and on the first one the command that uses the cluster."""

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
from skyrl_megatron.errors import LaunchError, SkyRLMegatronError
from skyrl_megatron.interrupts import replace_handlers, restore_handlers
from skyrl_megatron.workers.processes import LOOPBACK
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

LOOK_S = 0.5


@contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Collect the signals that ask this process to end, in order, instead of ending it."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        asked.append(number)

    before = replace_handlers(ask) | {signal.SIGUSR1: signal.signal(signal.SIGUSR1, ask)}
    try:
        yield asked
    finally:
        restore_handlers(before)


def run_asked_to_end(command: Sequence[str], environment: Mapping[str, str], asked: Callable[[], int]) -> int:
    """Run ``command``, with a SIGINT for each request that ``asked`` counts; returns its exit code (128 + a signal).

    A run saves its last step at the first one and ends at once at the second. It has a session of its own: what a
    terminal sends to all processes reaches it through here, once.
    """
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        passed = 0
        while process.poll() is None:
            for _ in range(asked() - passed):
                process.send_signal(signal.SIGINT)
                passed += 1
            time.sleep(LOOK_S)
    finally:
        process.kill()
        process.wait()
    code = process.returncode
    return code if code >= 0 else 128 - code


END_S = 15.0
"""How long Ray's processes may take to end before they are killed."""
SLOTS_WITHOUT_GPUS = 16
"""Logical CPUs of a host without GPUs: a rank or an engine takes one each, however few cores there are."""
WARNING = re.compile(r"\[\S+ \S+ [IW] \d+ \d+\]")
"""How lines of Ray's C++ parts begin that are no errors."""
_PR_SET_PDEATHSIG = 1


class RayNode:
    """``ray start --block`` on this host. Its processes end with this one, also when it is killed."""

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
        """``head``: of the cluster to join; None makes this host the head. ``extra``: options of ``ray start``.
        ``rails``: InfiniBand devices for NCCL."""
        self.log = folder.log(number)
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={address}", *ports.options(head=head is None)]
        if head is None:
            # nothing scales these hosts, and each helper less is 2 s of imports less beside the agents' 15 s
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
                start_new_session=True,  # what SLURM or a terminal sends to the group of a member is not for Ray
                preexec_fn=_end_with_parent,
            )
        self._seen: dict[int, psutil.Process] = {}

    def failed(self) -> str | None:
        """Return the last words of a Ray that has ended, None while it runs."""
        self._look()
        if self.process.poll() is None:
            return None
        said = last_words(self.log.read_text(errors="replace"))
        return f"Ray ended with exit code {self.process.returncode}: {said} (see {self.log})"

    def end(self) -> None:
        """End Ray's processes of this host: those that it started, no others."""
        self._look()
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

    def _look(self) -> None:
        """Remember every process below; a worker whose parent has ended would not be found later."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(process.pid, process)


def last_words(log: str) -> str:
    """Return the last two errors that a log of Ray tells of, without its warnings, or else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if ("rror" in line or "ailed" in line) and not WARNING.match(line)]
    return " ".join(errors[-2:] or lines[-1:])


def temp_folder(ports: Ports) -> str:
    """Return Ray's folder on each host: short, as the names of its sockets may have 107 characters."""
    return f"/tmp/ray-{os.getuid()}-{ports.first}"


def network_variables(address: str, rails: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that keep Ray, gloo and NCCL on ``address`` and ``rails``, unless the user has set them."""
    if address.startswith("127."):
        return {LOOPBACK_ALONE: "0"}
    interface = interface_of(address)
    asked = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface) if interface else {}
    asked |= {"NCCL_IB_HCA": f"={','.join(rails)}"} if rails else {}  # "=": these names, not what begins with them
    return {name: value for name, value in asked.items() if value and name not in os.environ}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def require_ray() -> None:
    """Raise LaunchError when Ray is not installed beside this interpreter."""
    if not Path(sys.executable).with_name("ray").exists():
        raise LaunchError(f"{sys.prefix} has no ray: run launch/setup.sh on this host, or share the checkout")


TELL_S = 20.0
ENDED_BEFORE = "the cluster ended before this host could join"
STARTED = "Ray runtime started"
TOO_SLOW = "timed out during startup"
LEAVE_S = 600.0
"""How long a host that was asked to end waits for the run on the first host to save and end."""


@dataclass(frozen=True)
class Place:
    """A host's place: its ``number`` of ``hosts``, the cluster's folder and ports, and how its Ray is started.

    ``within_s``: deadline for all hosts to be there. ``extra``: options of ``ray start``. ``rails``: InfiniBand
    devices that NCCL is to use; none: its own choice.
    """

    number: int
    hosts: int
    folder: Path
    ports: Ports
    interface: str | None = None
    within_s: float = 300.0
    extra: tuple[str, ...] = ()
    rails: tuple[str, ...] = ()


def take_part(place: Place, command: Sequence[str] = ()) -> int:
    """Run this host's part until the cluster ends; returns the exit code.

    On host 0, ``command`` runs once all hosts are there, with the variables that let it join, and its end is the
    cluster's; without one the cluster stays until it is asked to end. SIGINT, SIGTERM and SIGUSR1, and the folder's
    ``save``, ask the command to save and end (each is passed on as SIGINT), or end a cluster that has none. The other
    hosts outlast such signals: the run needs them until it has saved.

    Raises LaunchError when this host cannot take part, or another one is missing after ``place.within_s``.
    """
    if not place.folder.is_dir():
        raise LaunchError(
            f"{socket.gethostname()}: {place.folder} is not there; hosts of a cluster share its folder: start from a "
            "folder on a shared file system, or give one with --dir"
        )
    require_ray()
    require_rails(place.rails)
    folder = ClusterFolder(place.folder)
    if place.number == 0 and not (place.folder / "token").exists():
        folder = ClusterFolder.make(place.folder)
    if folder.ended:
        raise LaunchError(f"{socket.gethostname()}: {ENDED_BEFORE}")
    with collected_signals() as asked:
        try:
            if place.number > 0:
                return _other_host(place, folder, asked)
            return _first_host(place, folder, command, asked)
        except SkyRLMegatronError as error:
            folder.fail(place.number, str(error))
            raise
        finally:
            folder.leave(place.number)
            if place.number == 0:
                folder.end()


def _first_host(place: Place, folder: ClusterFolder, command: Sequence[str], asked: list[int]) -> int:
    address = LOOPBACK if place.hosts == 1 and place.interface is None else address_of(place.interface)
    place.ports.require_free(address)
    _join(folder, 0, address)
    node = _start(place, folder, address, None, asked)
    try:
        folder.announce(HeadAddress(address, place.ports.first, socket.gethostname()))
        _join(folder, 0, address, ready=True)
        _await_members(place, folder, node, asked)
        return _run(command, folder, node, asked) if command else _stay(folder, node, asked)
    finally:
        folder.end()
        node.end()


def _other_host(place: Place, folder: ClusterFolder, asked: list[int]) -> int:
    def announced() -> bool:
        if asked or folder.ended:
            raise LaunchError("; ".join(folder.failures()) or ENDED_BEFORE)
        return folder.head() is not None

    _wait(announced, place.within_s, "the first host to listen")
    head = folder.head()
    assert head is not None
    address = address_of(place.interface)
    place.ports.require_free(address)
    _require_reachable(head)
    _join(folder, place.number, address)
    node = _start(place, folder, address, head, asked)
    try:
        _join(folder, place.number, address, ready=True)
        return _stay(folder, node, asked, patience_s=LEAVE_S)
    finally:
        node.end()


def _join(folder: ClusterFolder, number: int, address: str, *, ready: bool = False) -> None:
    created = psutil.Process().create_time()
    folder.join(Member(number, socket.gethostname(), address, os.getpid(), created, ready))


def _start(place: Place, folder: ClusterFolder, address: str, head: HeadAddress | None, asked: list[int]) -> RayNode:
    """Start this host's Ray and wait for it. Ray gives itself 30 s, which a busy host may exceed: then it is tried
    again, while there is time."""
    ends = time.monotonic() + place.within_s

    def started() -> bool:
        if (why := node.failed()) is not None:
            raise LaunchError(f"{socket.gethostname()}: {why}")
        if asked or folder.ended:
            raise KeyboardInterrupt
        return STARTED in node.log.read_text(errors="replace")

    while True:
        node = RayNode(folder, place.number, address, place.ports, head, place.extra, place.rails)
        try:
            _wait(started, ends - time.monotonic(), f"Ray to start on {socket.gethostname()} (see {node.log})")
            return node
        except BaseException as error:
            node.end()
            if TOO_SLOW not in str(error) or time.monotonic() > ends:
                raise


def _await_members(place: Place, folder: ClusterFolder, node: RayNode, asked: list[int]) -> None:
    def all_there() -> bool:
        if failures := folder.failures():
            raise LaunchError("; ".join(failures))
        if (why := node.failed()) is not None:
            raise LaunchError(f"{socket.gethostname()}: {why}")
        if asked:
            raise KeyboardInterrupt
        return len(folder.ready()) == place.hosts

    def missing() -> str:
        there = folder.ready()
        numbers = sorted(set(range(place.hosts)) - {member.number for member in there})
        return (
            f"{len(there)} of {place.hosts} hosts are there ({', '.join(member.host for member in there)}); missing: "
            f"number {', '.join(map(str, numbers))}"
        )

    _wait(all_there, place.within_s, missing)
    hosts = ", ".join(f"{member.host} ({member.address})" for member in folder.ready())
    print(f"cluster: {place.hosts} {'host' if place.hosts == 1 else 'hosts'}: {hosts}", flush=True)


def _stay(folder: ClusterFolder, node: RayNode, asked: list[int], patience_s: float = 0.0) -> int:
    """Wait for the end of the cluster, or for ``patience_s`` after this host was asked to end."""
    ends = None
    while not folder.ended:
        if (why := node.failed()) is not None:
            raise LaunchError(f"{socket.gethostname()}: {why}")
        if asked and ends is None:
            ends = time.monotonic() + patience_s
        if ends is not None and time.monotonic() >= ends:
            break
        time.sleep(LOOK_S)
    return 0


def _run(command: Sequence[str], folder: ClusterFolder, node: RayNode, asked: list[int]) -> int:
    """Run the command, then tell what the cluster lost meanwhile; returns the command's exit code."""
    environment = folder.environment() | start_times.passed_on("cluster")
    code = run_asked_to_end(command, environment, lambda: len(asked) + folder.asked_to_save)
    own = node.failed()
    for why in [*folder.failures(), *([own] if own else [])]:
        print(why, file=sys.stderr)
    return code


def _require_reachable(head: HeadAddress) -> None:
    try:
        socket.create_connection((head.address, head.port), timeout=10).close()
    except OSError as error:
        raise LaunchError(
            f"{socket.gethostname()}: the first host, {head.host}, does not answer at {head.ray_address} ({error}); "
            "check firewall and route, or choose another interface with --interface"
        ) from error


def _wait(done: Callable[[], bool], within_s: float, what: str | Callable[[], str]) -> None:
    """Wait until ``done()``; say every 20 s what for. Raises LaunchError after ``within_s``."""
    started = told = time.monotonic()

    def words() -> str:
        return what if isinstance(what, str) else what()

    while not done():
        now = time.monotonic()
        if now - started > within_s:
            raise LaunchError(f"waited {within_s:.0f} s for {words()}; give more time with --within")
        if now - told >= TELL_S:
            told = now
            print(f"… waiting for {words()}: {now - started:.0f} s so far", flush=True)
        time.sleep(LOOK_S)
