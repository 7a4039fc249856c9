"""The folders that a run writes, as its nodes see them: one and the same, fast enough, and in order.

Order: what was written and synced first must be seen first. A checkpoint's last file says that the others are whole; a
shared file system that shows it earlier (prime-rl #2391) gives other nodes half a checkpoint, which the hashes of its
manifest would refuse.
"""

from __future__ import annotations

import os
import platform
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_megatron.errors import LaunchError

PROBE_BYTES = 16 << 20
SEEN_S = 45.0
"""How long a node may take to see a file: NFS believes in what it knows of a folder for up to half a minute."""
SLOW = 50e6
"""Bytes per second below which a folder is worth a warning: 400 GB, a 30B model's checkpoint, take two hours."""


@dataclass(frozen=True)
class FolderReport:
    """What a node has seen. ``missing``: folders without the asker's token; ``speed``: bytes per second by folder."""

    host: str
    missing: Sequence[str] = ()
    speed: Mapping[str, float] = field(default_factory=dict)


def begin(folders: Sequence[str], token: str) -> None:
    """Leave the token in every folder, made if needed. Raises LaunchError where that cannot be."""
    for folder in folders:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_durably(Path(folder, token), b"")
        except OSError as error:
            raise LaunchError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error


def look(folders: Sequence[str], token: str) -> FolderReport:
    """Look for the token in every folder, leave a file with this host's name beside it, and measure the writing: 16
    MiB, synced, once for each file system."""
    host, missing = platform.node(), []
    speed: dict[str, float] = {}
    measured: set[int] = set()
    for folder in folders:
        try:
            device = Path(folder, token).stat().st_dev
            own = Path(folder, f"{token}.{host}")
            own.touch()
            if device not in measured:
                measured.add(device)
                speed[folder] = _write_speed(own)
        except OSError:
            missing.append(folder)
    return FolderReport(host, missing, speed)


def show_in_order(folders: Sequence[str], token: str) -> None:
    """Write data, sync it and its folder, and only then the file that says that the data is whole."""
    data = os.urandom(PROBE_BYTES)
    for folder in folders:
        write_durably(Path(folder, f"{token}.data"), data)
        write_durably(Path(folder, f"{token}.whole"), str(zlib.crc32(data)).encode())


def out_of_order(folders: Sequence[str], token: str, within_s: float = SEEN_S) -> list[str]:
    """Return the folders whose last file is seen here before what was written earlier, or not in time. To be called
    right after :func:`show_in_order`, and not before: a name that was looked for in vain may stay unknown for long."""
    return [folder for folder in folders if not _whole(Path(folder), token, time.monotonic() + within_s)]


def end(folders: Sequence[str], token: str) -> None:
    """Remove all files of the check."""
    for folder in folders:
        for file in Path(folder).glob(f"{token}*"):
            file.unlink(missing_ok=True)


def write_durably(file: Path, content: bytes) -> None:
    """Write a file so that it survives a crash: its bytes, then its folder's entry."""
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    entry = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)


def _write_speed(file: Path) -> float:
    content = os.urandom(PROBE_BYTES)
    began = time.perf_counter()
    write_durably(file, content)
    return PROBE_BYTES / (time.perf_counter() - began)


def _whole(folder: Path, token: str, ends: float) -> bool:
    sentinel, data = folder / f"{token}.whole", folder / f"{token}.data"
    while True:
        try:
            expected = sentinel.read_text()
        except OSError:
            if time.monotonic() > ends:
                return False
            time.sleep(0.2)
            continue
        try:
            return expected == str(zlib.crc32(data.read_bytes()))
        except OSError:
            return False
