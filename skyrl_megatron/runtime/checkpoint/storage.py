"""Storage of checkpoints: a local folder, or an object store through fsspec; a lock per folder; a background task.

Both storages offer the same operations. A file system makes every write durable (fsync of the file, then of its
folder) and can rename a folder, so that a checkpoint appears atomically. An object store cannot rename: a folder there
is a checkpoint once it has its manifest, which is written last. Addresses such as ``s3://bucket/run`` are strings,
because ``pathlib`` would change them to ``s3:/bucket/run``.
"""

from __future__ import annotations

import contextlib
import errno
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


class BackgroundTask:
    """Runs one function at a time in a thread. ``name`` names it in errors.

    The thread is not a daemon: at exit the interpreter waits for it, so a save that is in progress is finished.
    """

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
            raise CheckpointError(f"{self._name} is still in progress; wait for it first")

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start ``function(*arguments)``. Raises CheckpointError if the last one is still running."""
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
        """Wait for the function. Raises its failure once as CheckpointError, and CheckpointError after a timeout."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(f"{self._name} did not end within {timeout_s:.0f} s; check the storage")
        self._thread = None
        # raised once: the next save starts without the failure of this one
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"{self._name} failed: {failure}") from failure


class LocalStorage:
    """A folder of a (shared) POSIX file system."""

    renames = True
    request_bytes = 4 * 2**20  # small enough to be hashed while still in the processor's cache

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))

    def path(self, *parts: str) -> str:
        """Return the full path of ``parts`` under the root."""
        return os.path.join(self.root, *parts)

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder; an empty list if it does not exist."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions") from error

    def exists(self, path: str) -> bool:
        """Return whether the file or folder exists."""
        return os.path.exists(path)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes. Raises FileNotFoundError."""
        return os.stat(path).st_size

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents."""
        os.makedirs(path, exist_ok=True)

    def create(self, path: str) -> FileWriter:
        """Create a file. Raises FileExistsError if it exists."""
        return LocalFile(path)

    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading, unbuffered. Raises FileNotFoundError."""
        _refuse_special(path)
        # unbuffered, because whole blocks go straight into the caller's memory
        return cast(IO[bytes], open(path, "rb", buffering=0))

    def read(self, path: str) -> bytes:
        """Return the content of a small file. Raises FileNotFoundError."""
        _refuse_special(path)
        with open(path, "rb") as file:
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        """Write a small file atomically: readers see the old content or the new, never a part."""
        temporary = f"{path}.new"
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            # before the rename: after a power failure the name must not lead to an empty file
            os.fsync(file.fileno())
        os.replace(temporary, path)
        self.sync_folder(os.path.dirname(path))

    def rename(self, old: str, new: str) -> None:
        """Rename a folder, durably."""
        os.rename(old, new)
        self.sync_folder(os.path.dirname(new))

    def remove(self, path: str) -> None:
        """Remove a file, or a folder and its content, if it exists."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.unlink(path)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        # POSIX keeps a new name only once its folder is synchronized
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def refuse_escape(self, folder: str, path: str) -> None:
        """Raise CheckpointError if ``path`` leads out of ``folder`` through a symbolic link."""
        # both resolved: the root itself may be a link, which is allowed
        inside = os.path.realpath(folder)
        target = os.path.realpath(path)
        if os.path.commonpath([inside, target]) != inside:
            raise CheckpointError(f"{path} is a link to {target}, outside of the checkpoint: refused; copy the file")


def _refuse_special(path: str) -> None:
    """Raise CheckpointError if the path is a pipe, a socket or a device."""
    try:
        refuse_special(Path(path))
    except BridgeError as error:
        raise CheckpointError(str(error)) from error


@contextlib.contextmanager
def _client_errors(address: str) -> Iterator[None]:
    """Convert every exception of a store's client to OSError(EIO), except FileNotFoundError and FileExistsError."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except Exception as error:
        # each client has exceptions of its own, and callers only know OSError
        lines = str(error).splitlines() or [""]
        raise OSError(errno.EIO, f"{type(error).__name__}: {lines[0]}", address) from error


@contextlib.contextmanager
def _listing_errors(address: str) -> Iterator[None]:
    """Raise CheckpointError if a store cannot be listed."""
    try:
        with _client_errors(address):
            yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{address} cannot be read ({error.strerror}); check that the store can be reached from here, and check "
            "the credentials"
        ) from error


def _raises_os_errors[**P, T](method: Callable[P, T]) -> Callable[P, T]:
    """Make a method of a store, whose first argument is an address, raise only OSError."""

    @functools.wraps(method)
    def raises(*args: P.args, **kwargs: P.kwargs) -> T:
        with _client_errors(cast(str, args[1])):
            return method(*args, **kwargs)

    return raises


class ObjectStorage:
    """An object store (``s3://``, ``gs://``, …) through fsspec. Exceptions of its client are raised as OSError."""

    renames = False
    request_bytes = 64 * 2**20  # a request costs a round trip

    def __init__(self, address: str) -> None:
        import fsspec

        try:
            self._files, _ = fsspec.url_to_fs(address)
        except (ImportError, ValueError) as error:
            scheme = address.split("://", 1)[0]
            raise CheckpointError(f"{address}: {error}; install the fsspec package for {scheme}://") from error
        # fsspec caches listings; another process writes the files that this one waits for
        self._files.use_listings_cache = False
        self.root = address.rstrip("/")

    def _at(self, path: str) -> str:
        """Return the name of an address within its store."""
        # private, but every file system of fsspec has it, and url_to_fs itself uses it
        return str(self._files._strip_protocol(path))

    def path(self, *parts: str) -> str:
        """Return the full address of ``parts`` under the root."""
        return posixpath.join(self.root, *parts)

    def names(self, path: str) -> list[str]:
        """Return the sorted names under a prefix; an empty list if there are none."""
        # another process may have written since: never a listing from the client's cache
        self._files.invalidate_cache(self._at(path))
        try:
            with _listing_errors(path):
                found = self._files.ls(self._at(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(name.rstrip("/")) for name in found)

    def exists(self, path: str) -> bool:
        """Return whether the object or prefix exists."""
        self._files.invalidate_cache(self._at(path))
        with _listing_errors(path):
            return bool(self._files.exists(self._at(path)))

    @_raises_os_errors
    def size(self, path: str) -> int:
        """Return the size of an object in bytes. Raises FileNotFoundError."""
        return int(self._files.size(self._at(path)))

    @_raises_os_errors
    def make_folder(self, path: str) -> None:
        """Create a folder if the store has folders; prefixes need not be created."""
        self._files.makedirs(self._at(path), exist_ok=True)

    @_raises_os_errors
    def create(self, path: str) -> FileWriter:
        """Create an object; it exists once finished."""
        return _WrittenObject(path, self._files.open(self._at(path), "wb"))

    @_raises_os_errors
    def open(self, path: str) -> IO[bytes]:
        """Open an object for reading by ranges. Raises FileNotFoundError."""
        # no cache: blocks are read in order and once, and fsspec would read ahead what is not needed
        return cast(IO[bytes], _ReadObject(path, self._files.open(self._at(path), "rb", cache_type="none")))

    @_raises_os_errors
    def read(self, path: str) -> bytes:
        """Return the content of a small object. Raises FileNotFoundError."""
        return bytes(self._files.cat_file(self._at(path)))

    @_raises_os_errors
    def write(self, path: str, data: bytes) -> None:
        """Write a small object."""
        self._files.pipe_file(self._at(path), data)

    def rename(self, old: str, new: str) -> None:
        """Raise NotImplementedError: an object store would copy every byte."""
        raise NotImplementedError("object stores do not rename")

    @_raises_os_errors
    def remove(self, path: str) -> None:
        """Remove an object, or everything under a prefix, if it exists."""
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
        with _client_errors(self._address):
            for part in parts:
                self._file.write(part)

    def finish(self) -> None:
        with _client_errors(self._address):
            self._file.close()

    def abandon(self) -> None:
        # not every client can discard an upload; one that is not closed never becomes an object
        discard = getattr(self._file, "discard", None)
        if discard is not None and not self._file.closed:
            with _client_errors(self._address):
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
        with _client_errors(self._address):
            return int(self._file.readinto(buffer))  # type: ignore[attr-defined]

    def close(self) -> None:
        self._file.close()
        super().close()


Storage = LocalStorage | ObjectStorage


def open_storage(root: str | Path) -> Storage:
    """Open the storage of ``root``: an address with a scheme (``s3://…``) is an object store, else it is a folder."""
    text = os.fspath(root)
    if not text:
        raise CheckpointError("trainer.ckpt_path is empty; set a folder or an s3:// or gs:// address")
    return ObjectStorage(text) if "://" in text else LocalStorage(text)
