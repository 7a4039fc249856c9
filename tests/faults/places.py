"""Where a run lives whose disk, network, object store or time of day a test has for itself. All are real and nobody
else's, except the time of day: a machine has one for all, so that the run's processes read another
(``jumping_clock.c``)."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.faults import object_store
from tests.faults.words import BYTES

OWN_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
DISK_BYTES = 256 << 20
HOUR_S = 3600


@dataclass(frozen=True)
class Place:
    """What a run is started with. ``kind``: ``disk``, ``failing disk``, ``network link``, ``object store``, ``clock``;
    "" for none of its own."""

    folder: Path
    kind: str = ""
    prefix: tuple[str, ...] = ()

    def repair(self) -> None:
        """Take away what is wrong with a disk; a network was gone with its run."""
        if self.kind == "disk":
            while self.folder.is_mount() and os.statvfs(self.folder).f_flag & os.ST_RDONLY:
                _run("umount", self.folder)
            (self.folder / "filler").unlink(missing_ok=True)
        if self.kind == "failing disk":
            mend_disk(self.folder)
        if self.kind == "object store":
            object_store.mend()

    def close(self) -> None:
        """Give a disk back."""
        while "disk" in self.kind and self.folder.is_mount():
            _run("umount", "--lazy", self.folder)


def kind_of(who: str, what: str) -> str:
    """Return the kind of place in which ``what`` may happen to ``who``; "": any will do."""
    if who == "disk" and what not in BYTES:
        return "disk" if what in ("full disk", "read-only disk") else "failing disk"
    return who if who in ("network link", "object store", "clock") else ""


def place(kind: str, folder: Path) -> Place:
    """Make a place in ``folder``, which exists and is empty."""
    if kind == "failing disk":
        files = folder.with_name(f"{folder.name}.files")
        files.mkdir()
        mend_disk(folder)
        _run(sys.executable, "-m", "tests.faults.failing_disk", files, folder, _state(folder))
        assert folder.is_mount(), folder
    if kind == "object store":
        object_store.start(folder.with_name(f"{folder.name}.log"))
    if kind == "disk":
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder)
    prefix: tuple[str, ...] = OWN_NETWORK if kind == "network link" else ()
    if kind == "clock":
        library = folder.with_name(f"{folder.name}.clock.so")
        _run("cc", "-O2", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("jumping_clock.c"), "-ldl")
        _set_ahead(folder, 0)
        prefix = ("env", f"LD_PRELOAD={library}", f"FAULTS_CLOCK={_ahead(folder)}")
    return Place(folder, kind, prefix)


def why_not(kind: str) -> str | None:
    """Return why such a place cannot be made here, None if it can."""
    if kind == "network link" and not (shutil.which("ip") and shutil.which("tc")):
        return "iproute2 is missing"
    if kind == "object store":
        return object_store.why_not()
    if kind == "clock":
        return None if shutil.which("cc") else "a C compiler is missing"
    if kind == "failing disk":
        try:
            import mfusepy  # noqa: F401
        except OSError:
            return "libfuse is missing"
        return None if os.access("/dev/fuse", os.W_OK) else "/dev/fuse cannot be opened"
    # a container may have a root that may do neither
    tries = {"disk": ("--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"), "network link": ("--net", "true")}
    if kind in tries and subprocess.run(["unshare", *tries[kind]], capture_output=True, timeout=30).returncode:
        return f"a {kind} of its own needs root"
    return None


def break_disk(folder: Path, what: str) -> None:
    """Let the disk that ``folder`` is be full, read-only for whoever opens a file there from now on, or fail or be
    slow at whatever is asked of it."""
    assert folder.is_mount(), folder
    if kind_of("disk", what) == "failing disk":
        _state(folder).write_text(what)
        return
    if what == "read-only disk":
        _run("mount", "--bind", folder, folder)
        _run("mount", "-o", "remount,bind,ro", folder)
        return
    try:
        with (folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    except OSError:
        pass


def mend_disk(folder: Path) -> None:
    """Let it be well again."""
    _state(folder).write_text("well")


def break_link(what: str) -> None:
    """Cut the loopback interface of this network, or let it carry 12 MB a second until it is repaired."""
    if what == "cut link":
        _run("ip", "link", "set", "lo", "down")
    else:
        _run(*"tc qdisc replace dev lo root tbf rate 100mbit burst 256kb latency 400ms".split())


def mend_link() -> None:
    """Let packets be as fast again as they were; they may be already."""
    subprocess.run("tc qdisc del dev lo root".split(), check=False, capture_output=True, timeout=30)


def jump(folder: Path) -> None:
    """Let the time of day be an hour ahead, or, where it is, an hour late."""
    (now,) = struct.unpack("<q", _ahead(folder).read_bytes())
    _set_ahead(folder, -HOUR_S if now > 0 else HOUR_S)


def _ahead(folder: Path) -> Path:
    """Return the file that says how many seconds the time of day is ahead."""
    return folder.with_name(f"{folder.name}.clock")


def _set_ahead(folder: Path, seconds: int) -> None:
    """Write in place, as processes have the file mapped."""
    with _ahead(folder).open("r+b" if _ahead(folder).exists() else "xb") as file:
        file.write(struct.pack("<q", seconds))


def _state(folder: Path) -> Path:
    """Return the file that says how a failing disk is."""
    return folder.with_name(f"{folder.name}.state")


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, timeout=30)
