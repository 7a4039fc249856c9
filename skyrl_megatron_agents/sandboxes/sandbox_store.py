"""What sandboxes keep on this machine: records of a run's sandboxes, and caches of images and dependencies.

All of it is in ``$SKYRL_MEGATRON_HOME/sandboxes`` (default ``~/.cache/skyrl_megatron/sandboxes``)::

    runs/<id>/lock          locked by the run as long as it lives, also against a kill -9
    runs/<id>/<sandbox>     JSON: what has to be removed if the run does not do it
    layers/<key>/           files of an image or of installed dependencies, complete if the folder has this name

A later run finds folders of runs that ended without removing them, because it gets their locks
(:meth:`RunRecords.left`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Any

from skyrl_megatron.errors import SandboxError

LOOK_S = 0.1


def home() -> Path:
    """Return the folder of all sandboxes of this user on this machine."""
    base = os.environ.get("SKYRL_MEGATRON_HOME", "~/.cache/skyrl_megatron")
    return Path(base).expanduser().absolute() / "sandboxes"


class RunRecords:
    """The records of one run and one provider. The lock belongs to this process and is lost when it ends in any
    way."""

    def __init__(self, provider: str, folder: Path | None = None) -> None:
        self._runs = (folder or home()) / "runs"
        self.id = f"{provider}-{secrets.token_hex(6)}"
        self.folder = self._runs / self.id
        self.folder.mkdir(parents=True, mode=0o700)
        self._provider = provider
        self._lock = _locked(self.folder)
        if self._lock is None:  # impossible with a new name, except where locks do not work
            raise SandboxError(f"{self.folder} cannot be locked: set SKYRL_MEGATRON_HOME to a folder of a local disk")

    def write(self, sandbox: str, record: dict[str, Any]) -> None:
        """Record a sandbox before anything of it is started."""
        partial = self.folder / f".{sandbox}"
        partial.write_text(json.dumps(record))
        partial.rename(self.folder / sandbox)

    def remove(self, sandbox: str) -> None:
        """Forget a sandbox that left nothing."""
        (self.folder / sandbox).unlink(missing_ok=True)

    @contextlib.contextmanager
    def left(self) -> Iterator[list[tuple[Path, dict[str, Any]]]]:
        """Yield files and records of sandboxes of ended runs of this provider, whose folders stay locked meanwhile.

        The caller deletes the file of what it has removed. Then folders without records are deleted.
        """
        with contextlib.ExitStack() as held:
            folders = []
            records = []
            for folder in sorted(self._runs.glob(f"{self._provider}-*")):
                if folder != self.folder and (lock := _locked(folder)) is not None:
                    held.enter_context(lock)
                    folders.append(folder)
                    records += [
                        (path, record) for path in folder.glob("[!.]*") if (record := _record(path)) is not None
                    ]
            yield records
            for folder in folders:
                if not any(_record(path) is not None for path in folder.glob("[!.]*")):
                    shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Release the lock. Deletes the folder if no sandbox is recorded."""
        if self._lock is not None:
            if not any(_record(path) is not None for path in self.folder.glob("[!.]*")):
                shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()
            self._lock = None


def _record(path: Path) -> dict[str, Any] | None:
    if path.name == "lock" or not path.is_file():
        return None
    with contextlib.suppress(OSError, ValueError):
        record: dict[str, Any] = json.loads(path.read_text())
        return record
    return {}


def _locked(folder: Path) -> IO[str] | None:
    """Return the open, locked file of a run's folder, or None if its run is alive or removes it."""
    try:
        file = open(folder / "lock", "w")
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


class Layers:
    """Folders made once and used by all sandboxes of this machine, by a key of what they are made from."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or home()) / "layers"
        self._making: dict[str, asyncio.Lock] = {}

    async def get(self, key: str, make: Callable[[Path], Awaitable[None]], timeout_s: float) -> Path:
        """Return the folder of ``key``. If it is new, call ``make`` with an empty folder.

        One maker per key, over all processes of this machine; the others wait. Raises SandboxError after
        ``timeout_s``, and what ``make`` raises; then nothing is kept.
        """
        finished = self.folder / hashlib.sha256(key.encode()).hexdigest()[:32]
        if finished.is_dir():
            return finished
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(timeout_s), self._making.setdefault(key, asyncio.Lock()):
                async with _waiting_lock(finished.with_suffix(".lock")):
                    if not finished.is_dir():
                        partial = finished.with_suffix(".partial")
                        shutil.rmtree(partial, ignore_errors=True)
                        partial.mkdir()
                        try:
                            await make(partial)
                            partial.rename(finished)
                        finally:
                            shutil.rmtree(partial, ignore_errors=True)
        except TimeoutError:
            raise SandboxError(f"files of sandboxes were not made within {timeout_s:g} s: {key[:200]}") from None
        return finished


@contextlib.asynccontextmanager
async def _waiting_lock(path: Path) -> AsyncIterator[None]:
    """Hold the lock of a file. The caller sets the deadline."""
    with open(path, "w") as file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            await asyncio.sleep(LOOK_S)
        yield


def unpack_image(archive: Path, folder: Path) -> None:
    """Unpack a root file system (``.tar``, also compressed) without devices and without leaving ``folder``.

    Raises SandboxError.
    """
    try:
        with tarfile.open(archive) as opened:
            members = [member for member in opened if not (member.ischr() or member.isblk() or member.isfifo())]
            opened.extractall(folder, members, filter="tar")
    except (OSError, tarfile.TarError) as error:
        raise SandboxError(f"image {archive} cannot be unpacked: {error}") from error
    folder.chmod(0o755)
