"""Ray's processes on one host: started in a session of their own, ended all of them and nobody else's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from skyrl_megatron import device
from skyrl_megatron.cluster.addresses import Ports, interface_of
from skyrl_megatron.cluster.folder import LOOPBACK_ALONE, ClusterFolder, HeadAddress
from skyrl_megatron.errors import LaunchError

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
