"""Control groups of sandboxes: limits that the kernel enforces on all processes of a sandbox together.

Version 2 is used where this process may make groups with the controllers ``memory`` and ``pids``, otherwise version 1
where it may do so in both hierarchies. Otherwise :func:`find` returns None, and limits are per process. ``cpu``
is limited if its controller is there. See the kernel's ``admin-guide/cgroup-v2.rst`` and ``cgroup-v1/``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_megatron_agents.sandboxes.sandbox import Limits

NEEDED = ("memory", "pids")
PERIOD_US = 100_000
PREFIX = "skyrl-sandbox-"
REMOVE_S = 5.0
"""Time in seconds that the processes of a group have to disappear after SIGKILL."""
OVERHEAD = 64 << 20
"""Bytes of memory for the processes that keep a sandbox, in addition to its limit."""


@dataclass(frozen=True)
class ControlGroups:
    """Where groups are made: one folder in version 2, or one for each controller in version 1."""

    version: int
    parents: Mapping[str, Path]

    def folders(self, name: str) -> tuple[Path, ...]:
        """Return the folders of a group, which need not exist."""
        return tuple(dict.fromkeys(parent / f"{PREFIX}{name}" for parent in self.parents.values()))

    def make(self, name: str, limits: Limits) -> tuple[Path, ...]:
        """Make a group and return its folders. Files of a sandbox are memory, so both limits are added up.

        Raises OSError.
        """
        memory = str(limits.memory + limits.disk + OVERHEAD)
        quota = int(limits.cpus * PERIOD_US)
        processes = str(limits.processes + 2)  # the keeper and process 1
        two = self.version == 2
        written = {
            "memory": (("memory.max" if two else "memory.limit_in_bytes", memory),),
            "pids": (("pids.max", processes),),
            "cpu": (("cpu.max", f"{quota} {PERIOD_US}"),)
            if two
            else (("cpu.cfs_period_us", str(PERIOD_US)), ("cpu.cfs_quota_us", str(quota))),
        }
        folders = self.folders(name)
        try:
            for folder in folders:
                folder.mkdir()
            for controller, parent in self.parents.items():
                for file, value in written[controller]:
                    (parent / f"{PREFIX}{name}" / file).write_text(value)
            if two:
                with contextlib.suppress(OSError):  # no swap in this kernel
                    (folders[0] / "memory.swap.max").write_text("0")
        except OSError:
            remove(folders)
            raise
        return folders


def find() -> ControlGroups | None:
    """Return where this process may make groups with limits of memory and processes, or None."""
    mounts = _mounts()
    paths = dict(_own())
    if "" in mounts and "" in paths:
        here = mounts[""] / paths[""].lstrip("/")
        for parent in (here, here.parent):
            if (groups := _with_controllers(parent)) is not None:
                return groups
    parents = {
        controller: mounts[controller] / paths[controller].lstrip("/")
        for controller in (*NEEDED, "cpu")
        if controller in mounts and controller in paths
    }
    parents = {name: parent for name, parent in parents.items() if os.access(parent, os.W_OK)}
    return ControlGroups(1, parents) if all(name in parents for name in NEEDED) else None


def _with_controllers(parent: Path) -> ControlGroups | None:
    """Return groups of version 2 below ``parent`` if its children can have the needed controllers."""
    control = parent / "cgroup.subtree_control"
    if not (os.access(parent, os.W_OK) and os.access(control, os.W_OK)):
        return None
    for name in (*NEEDED, "cpu"):
        # Refused where the controller is absent, and where the group has processes of its own.
        with contextlib.suppress(OSError):
            control.write_text(f"+{name}")
    enabled = control.read_text().split()
    if not all(name in enabled for name in NEEDED):
        return None
    return ControlGroups(2, {name: parent for name in (*NEEDED, "cpu") if name in enabled})


def _mounts() -> dict[str, Path]:
    """Return mount points by controller; version 2 has the name ``""``."""
    mounts = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mount_point = Path(before.split()[4])
        if kind == "cgroup2":
            mounts[""] = mount_point
        elif kind == "cgroup":
            mounts |= dict.fromkeys(options.split(","), mount_point)
    return mounts


def _own() -> Sequence[tuple[str, str]]:
    """Return controller and group of this process, of each hierarchy."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    parts = [line.split(":", 2) for line in lines]
    return [(controller, group) for _, controllers, group in parts for controller in controllers.split(",")]


def memory_kills(folders: Sequence[Path]) -> int:
    """Return how many processes of a group were killed because its memory ran out."""
    for folder in folders:
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                counts = dict(line.split() for line in (folder / name).read_text().splitlines())
                return int(counts.get("oom_kill", 0))
    return 0


def remove(folders: Sequence[Path]) -> bool:
    """Kill what is in a group and remove it. Returns whether it is gone; blocks for at most ``REMOVE_S``."""
    deadline = time.monotonic() + REMOVE_S
    for folder in folders:
        while folder.is_dir():
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            for process in _processes(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, 9)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
    return True


def _processes(folder: Path) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    return []
