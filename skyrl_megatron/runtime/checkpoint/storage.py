"""Where checkpoints are stored: a local folder, or an object store through fsspec; one writer per folder.

The thread is not a daemon: when the program ends, by its last line, ``sys.exit`` or an exception, the interpreter
waits for it, so a save that is under way is finished.

Both offer the same few operations. A file system makes every write durable (fsync of the file, then of its folder)
and can rename a folder, so that a checkpoint appears at once. An object store cannot rename: a folder there is a
checkpoint once it holds its manifest, which is written last. Addresses such as ``s3://bucket/run`` are kept as text:
``pathlib`` would turn them into ``s3:/bucket/run``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import os
import posixpath
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from bridges.errors import BridgeError
from bridges.files import refuse_special
from bridges.staging import FileWriter, LocalFile
from skyrl_megatron.errors import CheckpointError


class Background:
    """Runs one function at a time. ``name`` says in errors what it does."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether the function is still running."""
        return self._thread is not None and self._thread.is_alive()

    def check_idle(self) -> None:
        """Raise CheckpointError while the function is running."""
        if self.busy:
            raise CheckpointError(f"{self._name} is still under way; wait for it first")

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start ``function(*arguments)``. Raises CheckpointError when the last one is still running."""
        self.check_idle()

        def run() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                self._failure = error

        self._failure = None
        self._thread = threading.Thread(target=run, name=self._name)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until the function has ended. Raises CheckpointError when it failed, once, or takes longer."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(f"{self._name} has not ended within {timeout_s:.0f} s; check the storage")
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"{self._name} failed: {failure}") from failure


_held: set[str] = set()  # a POSIX record lock does not exclude its own process


class FolderLock:
    """An exclusive lock on the file ``.lock`` of a folder, held from construction to :meth:`release`.

    A POSIX record lock: it works over NFS, children made by fork do not inherit it, and after ``kill -9`` it is free
    at once. ``setting``: what chooses the folder. Raises CheckpointError, naming the holder, when another process has
    it.
    """

    def __init__(self, folder: str, setting: str = "trainer.ckpt_path") -> None:
        self.path = os.path.join(os.path.realpath(folder), ".lock")
        if self.path in _held:
            raise CheckpointError(f"{folder} is being written by this process already; close that store first")
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be written ({error.strerror}); check {setting}") from error
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 64).decode(errors="replace").strip() or "another process"
            os.close(self._descriptor)
            raise CheckpointError(
                f"{folder} is being written by {holder}; end that run, or give this one another {setting}"
            ) from error
        os.truncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
        _held.add(self.path)

    def release(self) -> None:
        """Give the lock back; safe to call twice."""
        if self.path in _held:
            _held.discard(self.path)
            os.close(self._descriptor)


class LocalStorage:
    """A folder of a (shared) POSIX file system."""

    renames = True
    request_bytes = 4 * 2**20  # small enough to be hashed while still in the processor's cache

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))

    def path(self, *parts: str) -> str:
        """Return full path of something under the root."""
        return os.path.join(self.root, *parts)

    def names(self, path: str) -> list[str]:
        """Return sorted names in a folder; none when it does not exist."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions") from error

    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder."""
        return os.path.exists(path)

    def size(self, path: str) -> int:
        """Return bytes of a file. Raises FileNotFoundError."""
        return os.stat(path).st_size

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents."""
        os.makedirs(path, exist_ok=True)

    def create(self, path: str) -> FileWriter:
        """Create a file. Raises FileExistsError if there is one."""
        return LocalFile(path)

    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading, unbuffered. Raises FileNotFoundError."""
        _refuse_special(path)
        return cast(IO[bytes], open(path, "rb", buffering=0))

    def read(self, path: str) -> bytes:
        """Return all of a small file. Raises FileNotFoundError."""
        _refuse_special(path)
        with open(path, "rb") as file:
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        """Put a small file in place at once: readers see the old content or the new, never a part."""
        beside = f"{path}.new"
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        self.sync_folder(os.path.dirname(path))

    def rename(self, old: str, new: str) -> None:
        """Rename a folder, durably."""
        os.rename(old, new)
        self.sync_folder(os.path.dirname(new))

    def remove(self, path: str) -> None:
        """Remove a file, or a folder and all in it; fine when it is not there."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.unlink(path)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def refuse_escape(self, folder: str, path: str) -> None:
        """Raise CheckpointError when ``path`` leads out of ``folder`` through a symbolic link."""
        inside = os.path.realpath(folder)
        target = os.path.realpath(path)
        if os.path.commonpath([inside, target]) != inside:
            raise CheckpointError(f"{path} is a link to {target}, outside of the checkpoint: refused; copy the file")


def _refuse_special(path: str) -> None:
    """Raise CheckpointError where there is a pipe, a socket or a device."""
    try:
        refuse_special(Path(path))
    except BridgeError as error:
        raise CheckpointError(str(error)) from error


@contextlib.contextmanager
def _as_of_a_disk(address: str) -> Iterator[None]:
    """Raise whatever a store's client raises as the OSError of a disk that fails. What is not there stays so."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise OSError(errno.EIO, f"{type(error).__name__}: {lines[0]}", address) from error


@contextlib.contextmanager
def _readable(address: str) -> Iterator[None]:
    """Raise CheckpointError where a store does not say what it has."""
    try:
        with _as_of_a_disk(address):
            yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{address} cannot be read ({error.strerror}); check that the store can be reached from here, and that "
            "it takes these credentials"
        ) from error


def _of_a_store[**P, T](method: Callable[P, T]) -> Callable[P, T]:
    """Let a method of a store, whose first argument is an address, raise OSError alone."""

    @functools.wraps(method)
    def raises(*args: P.args, **kwargs: P.kwargs) -> T:
        with _as_of_a_disk(cast(str, args[1])):
            return method(*args, **kwargs)

    return raises


class ObjectStorage:
    """An object store (``s3://``, ``gs://``, …) through fsspec. Whatever its client raises comes as an OSError."""

    renames = False
    request_bytes = 64 * 2**20  # a request costs a round trip

    def __init__(self, address: str) -> None:
        import fsspec

        try:
            self._files, _ = fsspec.url_to_fs(address)
        except (ImportError, ValueError) as error:
            scheme = address.split("://", 1)[0]
            raise CheckpointError(f"{address}: {error}; install the fsspec package for {scheme}://") from error
        self._files.use_listings_cache = False
        self.root = address.rstrip("/")

    def _at(self, path: str) -> str:
        """Return the name of an address within its store."""
        return str(self._files._strip_protocol(path))

    def path(self, *parts: str) -> str:
        """Return full address of something under the root."""
        return posixpath.join(self.root, *parts)

    def names(self, path: str) -> list[str]:
        """Return sorted names under a prefix; none when nothing is there."""
        self._files.invalidate_cache(self._at(path))
        try:
            with _readable(path):
                found = self._files.ls(self._at(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(name.rstrip("/")) for name in found)

    def exists(self, path: str) -> bool:
        """Return whether there is an object or a prefix."""
        self._files.invalidate_cache(self._at(path))
        with _readable(path):
            return bool(self._files.exists(self._at(path)))

    @_of_a_store
    def size(self, path: str) -> int:
        """Return bytes of an object. Raises FileNotFoundError."""
        return int(self._files.size(self._at(path)))

    @_of_a_store
    def make_folder(self, path: str) -> None:
        """Do nothing: prefixes need not be made; a store with real folders makes one."""
        self._files.makedirs(self._at(path), exist_ok=True)

    @_of_a_store
    def create(self, path: str) -> FileWriter:
        """Create an object; it exists once finished."""
        return _WrittenObject(path, self._files.open(self._at(path), "wb"))

    @_of_a_store
    def open(self, path: str) -> IO[bytes]:
        """Open an object for reading by ranges. Raises FileNotFoundError."""
        return cast(IO[bytes], _ReadObject(path, self._files.open(self._at(path), "rb", cache_type="none")))

    @_of_a_store
    def read(self, path: str) -> bytes:
        """Return all of a small object. Raises FileNotFoundError."""
        return bytes(self._files.cat_file(self._at(path)))

    @_of_a_store
    def write(self, path: str, data: bytes) -> None:
        """Put a small object in place."""
        self._files.pipe_file(self._at(path), data)

    def rename(self, old: str, new: str) -> None:
        """Raise NotImplementedError: an object store would copy every byte."""
        raise NotImplementedError("object stores do not rename")

    @_of_a_store
    def remove(self, path: str) -> None:
        """Remove an object, or all under a prefix; fine when nothing is there."""
        if self._files.exists(self._at(path)):
            self._files.rm(self._at(path), recursive=True)

    def sync_folder(self, path: str) -> None:
        """Do nothing: a finished object is durable."""

    def refuse_escape(self, folder: str, path: str) -> None:
        """Do nothing: object stores have no links."""


class _WrittenObject:
    def __init__(self, address: str, file: IO[bytes]) -> None:
        self._address, self._file = address, file

    def write(self, *parts: memoryview | bytes) -> None:
        with _as_of_a_disk(self._address):
            for part in parts:
                self._file.write(part)

    def finish(self) -> None:
        with _as_of_a_disk(self._address):
            self._file.close()

    def abandon(self) -> None:
        discard = getattr(self._file, "discard", None)
        if discard is not None and not self._file.closed:
            with _as_of_a_disk(self._address):
                discard()


class _ReadObject(io.RawIOBase):
    def __init__(self, address: str, file: IO[bytes]) -> None:
        self._address, self._file = address, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        with _as_of_a_disk(self._address):
            return int(self._file.readinto(buffer))  # type: ignore[attr-defined]

    def close(self) -> None:
        self._file.close()
        super().close()


Storage = LocalStorage | ObjectStorage


def open_storage(root: str | Path) -> Storage:
    """Open the storage of ``root``: an address with a scheme (``s3://…``) is an object store, all else a folder."""
    text = os.fspath(root)
    if not text:
        raise CheckpointError("trainer.ckpt_path is empty; give a folder or an s3:// or gs:// address")
    return ObjectStorage(text) if "://" in text else LocalStorage(text)
