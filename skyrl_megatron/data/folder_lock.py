"""One writer per folder of checkpoints or of a journal: a lock that the kernel releases when its process ends."""

from __future__ import annotations

import fcntl
import os

from skyrl_megatron.errors import CheckpointError

_locked_paths: set[str] = set()  # a POSIX record lock does not exclude its own process


class FolderLock:
    """An exclusive lock on the file ``.lock`` of a folder, held from construction to :meth:`release`.

    A POSIX record lock: it works over NFS, forked children do not inherit it, and ``kill -9`` releases it.
    ``setting``: the configuration key of the folder, for messages. Raises CheckpointError, which names the holder, if
    another process holds it.
    """

    def __init__(self, folder: str, setting: str = "trainer.ckpt_path") -> None:
        self.path = os.path.join(os.path.realpath(folder), ".lock")
        if self.path in _locked_paths:
            raise CheckpointError(f"{folder} is already being written by this process; close that store first")
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
        _locked_paths.add(self.path)

    def release(self) -> None:
        """Release the lock. May be called twice."""
        if self.path in _locked_paths:
            _locked_paths.discard(self.path)
            os.close(self._descriptor)
