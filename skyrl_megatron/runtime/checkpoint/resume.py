"""Which checkpoint a run continues from: ``trainer.resume_mode`` none, latest or from_path."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from skyrl_megatron.errors import CheckpointError, SkyRLMegatronWarning
from skyrl_megatron.runtime.checkpoint.manifest import check_files, read_manifest
from skyrl_megatron.runtime.checkpoint.storage import open_storage
from skyrl_megatron.runtime.checkpoint.store import CheckpointStore, SavedCheckpoint


class Candidates(Iterator[SavedCheckpoint]):
    """Checkpoints to try, best first. A caller that could not load one calls :meth:`reject` and takes the next.

    Ends when there is nothing to resume. Raises CheckpointError when checkpoints were there and all of them were
    passed: starting anew would in time prune them.
    """

    def __init__(self, found: Iterator[SavedCheckpoint], *, root: str, only: bool, any_folder: bool) -> None:
        self._found, self._root, self._only, self._any_folder = found, root, only, any_folder

    def __next__(self) -> SavedCheckpoint:
        try:
            return next(self._found)
        except StopIteration:
            if not self._any_folder:
                raise
            raise CheckpointError(
                f"no checkpoint in {self._root} can be loaded (see the warnings above); repair one, set "
                "trainer.resume_mode=none to start anew, or give another trainer.ckpt_path"
            ) from None

    def reject(self, reason: str) -> None:
        """Pass the last one, which could not be loaded. Raises CheckpointError when it was the only choice."""
        if self._only:
            raise CheckpointError(reason)
        warnings.warn(f"{reason}: skipped, trying the one before", SkyRLMegatronWarning, stacklevel=2)


def choose(store: CheckpointStore, mode: str | None, path: str | None) -> Candidates:
    """Return the checkpoints to try for ``mode`` and ``path``. Raises CheckpointError, naming the key to change, for
    an unknown mode and for a ``path`` that is no complete checkpoint."""
    if mode is None or mode == "none":
        return Candidates(iter(()), root=store.root, only=True, any_folder=False)
    if mode == "latest":
        return Candidates(store.candidates(), root=store.root, only=False, any_folder=store.has_checkpoints())
    if mode != "from_path":
        raise CheckpointError(f"trainer.resume_mode={mode}: must be none, latest or from_path")
    if not path:
        raise CheckpointError("trainer.resume_path is not set; resume_mode=from_path needs a checkpoint folder")
    storage = open_storage(path)
    try:
        manifest = read_manifest(storage, storage.root)
        check_files(storage, storage.root, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"trainer.resume_path={path}: {error}") from error
    return Candidates(iter([SavedCheckpoint(path, manifest)]), root=path, only=True, any_folder=False)
