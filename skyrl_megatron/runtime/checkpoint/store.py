"""The folder of a run's checkpoints: which are complete, which is the newest, which one a run resumes from.

    <root>/latest_ckpt_global_step.txt           the newest complete step, for people and tools
    <root>/global_step_<N>/MANIFEST.json         last in the folder: without it, this is not a checkpoint
    <root>/global_step_<N>/{data,trainer_state}.json
    <root>/global_step_<N>/{policy,critic}/      torch_dist: .metadata, metadata.json, __<rank>_0.distcp,
                                                 state.json, rng_<rank>.safetensors
    <root>/global_step_<N>/<role>/adapter/       LoRA adapters, free of topology (safetensors)

A save goes: shards → manifest → folder renamed from ``global_step_<N>.tmp`` → pointer → older ones pruned. Every step
is durable before the next begins, so a process may end anywhere. A store may be driven by a process that is no rank.

A folder may hold checkpoints of several runs, or branches of one: a run that starts anew, or goes back to an earlier
step, leaves those of the run before it, with steps as high as they were. The pointer says which branch is meant; each
manifest, which branches its own continues. Resuming and retention look at the checkpoints of that line alone.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_megatron.errors import CheckpointError, SkyRLMegatronWarning
from skyrl_megatron.runtime.checkpoint.manifest import (
    MANIFEST,
    PARTS,
    Manifest,
    check_files,
    check_hashes,
    complete_role,
    hash_bytes,
    read_manifest,
    read_verified,
    versions,
    wait_for_notes,
)
from skyrl_megatron.runtime.checkpoint.storage import FolderLock, LocalStorage, open_storage

logger = logging.getLogger(__name__)

POINTER = "latest_ckpt_global_step.txt"
DATA = "data.json"
TRAINER_STATE = "trainer_state.json"
_STEP = re.compile(r"global_step_(\d+)")
_TMP, _REPLACED, _REMOVED = ".tmp", ".replaced", ".removed"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint: where it is, and its manifest. Contents are hash-checked as they are read."""

    folder: str
    manifest: Manifest

    @property
    def step(self) -> int:
        """Training step after which it was taken."""
        return self.manifest.step


class CheckpointStore:
    """All checkpoints under ``root``, a folder or an ``s3://``/``gs://`` address.

    Reading needs no lock. The first :meth:`begin` takes the lock of a folder until :meth:`close`. An object store has
    neither locks nor renames: there, one writer is the caller's promise, and saving a step anew removes its old
    checkpoint first. ``keep``: how many checkpoints stay; -1: all. ``hub_commits``: noted in every manifest.
    """

    def __init__(self, root: str | Path, *, keep: int = -1, hub_commits: Mapping[str, str] | None = None) -> None:
        self.storage = open_storage(root)
        self.root = self.storage.root
        self.keep, self.hub_commits = keep, dict(hub_commits or {})
        self._lock: FolderLock | None = None
        self._branch, self._ancestry = uuid.uuid4().hex, dict[str, int]()

    # ------------------------------------------------------------------------------------------ writing
    def continue_from(self, checkpoint: SavedCheckpoint) -> None:
        """Save from here on as a branch that continues ``checkpoint``; without this call, as one with a new start."""
        manifest = checkpoint.manifest
        self._branch, self._ancestry = uuid.uuid4().hex, manifest.ancestry | {manifest.branch: manifest.step}
        if open_storage(checkpoint.folder).root != self.folder(manifest.step):
            self._ancestry.pop("", None)  # older checkpoints of another folder are not those of this one

    def begin(self, step: int, roles: Mapping[str, int], *, last_step_finite: bool = True) -> str | None:
        """Make the folder into which the ranks of ``roles`` (role → number of ranks) write step ``step``.

        None, with a warning, after a step whose gradient or loss was not finite. Raises CheckpointError when the
        folder cannot be written or another run writes it.
        """
        if not last_step_finite:
            warnings.warn(
                f"step {step} was not finite: no checkpoint is made of it", SkyRLMegatronWarning, stacklevel=2
            )
            return None
        folder = self.storage.path(self._name(step, writing=True))
        try:
            self.open_for_writing()
            self.storage.remove(folder)
            for role in roles:
                self.storage.make_folder(f"{folder}/{role}/{PARTS}")
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be made ({error.strerror}); check trainer.ckpt_path") from error
        return folder

    def commit(
        self,
        step: int,
        roles: Mapping[str, int],
        extras: Mapping[str, bytes],
        *,
        timeout_s: float,
    ) -> str:
        """Wait for all ranks, complete the folder, and make it the newest checkpoint. Returns its path.

        ``extras``: contents of :data:`DATA`, :data:`TRAINER_STATE`, and of small files below a role's folder. On any
        failure what was written of this step is removed, older checkpoints stay, and CheckpointError is raised.
        """
        folder = self.storage.path(self._name(step, writing=True))
        try:
            manifest = self._complete(step, folder, roles, extras, timeout_s)
            final = self._publish(step, folder, manifest)
        except (OSError, CheckpointError) as error:
            self.discard(step)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{error.filename or folder} cannot be written ({error.strerror})") from error
        try:
            self.storage.write(self.storage.path(POINTER), f"{step}\n".encode())
            self.prune(self.keep, sound=step)
        except OSError as error:
            raise CheckpointError(f"{self.root}: {error.strerror}; step {step} itself is complete") from error
        return final

    def give_up(self, step: int, role: str, ranks: Iterable[int]) -> None:
        """Note that ``ranks``, which are lost, write nothing more of a save that is under way."""
        folder = self.storage.path(self._name(step, writing=True), role, PARTS)
        for rank in ranks:
            if not self.storage.exists(f"{folder}/{rank}.json"):
                self.storage.write(f"{folder}/{rank}.failed", f"rank {rank} was lost".encode())

    def discard(self, step: int) -> None:
        """Remove what was written of an incomplete save."""
        folder = self.storage.path(self._name(step, writing=True))
        if self.storage.renames or not self.storage.exists(f"{folder}/{MANIFEST}"):
            self.storage.remove(folder)

    def open_for_writing(self) -> None:
        """Take the lock and clear up after a run that was killed: half-written saves go, a checkpoint that was being
        replaced comes back. Raises CheckpointError when another run writes here."""
        if self._lock is not None or not isinstance(self.storage, LocalStorage):
            return
        self.storage.make_folder(self.root)
        self._lock = FolderLock(self.root)
        for name in self.storage.names(self.root):
            if not _STEP.match(name):
                continue
            if name.endswith((_TMP, _REMOVED)):
                logger.warning("%s: clearing up after a run that was interrupted", self.storage.path(name))
                self.storage.remove(self.storage.path(name))
            elif name.endswith(_REPLACED):
                whole = self.storage.path(name.removesuffix(_REPLACED))
                if self.storage.exists(whole):
                    self.storage.remove(self.storage.path(name))
                else:
                    self.storage.rename(self.storage.path(name), whole)

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _name(self, step: int, *, writing: bool = False) -> str:
        return f"global_step_{step}" + (_TMP if writing and self.storage.renames else "")

    def _complete(
        self, step: int, folder: str, roles: Mapping[str, int], extras: Mapping[str, bytes], timeout_s: float
    ) -> Manifest:
        manifest = Manifest(step, {}, {}, versions(), self.hub_commits, branch=self._branch, ancestry=self._ancestry)
        for name, content in extras.items():
            if "/" in name:
                self.storage.make_folder(f"{folder}/{posixpath.dirname(name)}")
            self.storage.write(f"{folder}/{name}", content)
            manifest.files[name] = hash_bytes(content)
        for role, world_size in roles.items():
            notes = wait_for_notes(self.storage, folder, role, world_size, timeout_s)
            manifest.layouts[role] = notes[0]["layout"]
            if base := notes[0].get("base"):
                manifest.bases[role] = base
            manifest.files |= complete_role(self.storage, folder, role, notes)
        return manifest

    def _publish(self, step: int, folder: str, manifest: Manifest) -> str:
        self.storage.write(f"{folder}/{MANIFEST}", manifest.to_bytes())
        if not self.storage.renames:
            return folder
        final = self.folder(step)
        aside = final + _REPLACED
        if self.storage.exists(final):  # a step saved anew, after an older one was resumed
            self.storage.rename(final, aside)
        try:
            self.storage.rename(folder, final)
        except OSError:
            if self.storage.exists(aside):
                self.storage.rename(aside, final)
            raise
        self.storage.remove(aside)
        return final

    # ------------------------------------------------------------------------------------------ reading
    def folder(self, step: int) -> str:
        """Return where the complete checkpoint of a step lies."""
        return self.storage.path(self._name(step))

    def steps(self) -> list[int]:
        """Return the steps that have a folder, newest first; some may be incomplete."""
        names = (_STEP.fullmatch(name) for name in self.storage.names(self.root))
        return sorted((int(match[1]) for match in names if match), reverse=True)

    def has_checkpoints(self) -> bool:
        """Return whether anything here was ever a complete checkpoint. On an object store a prefix without a manifest
        is a save that did not end; a folder got its name when it was complete."""
        steps = self.steps()
        if self.storage.renames:
            return bool(steps)
        return any(self.storage.exists(self.storage.path(self._name(step), MANIFEST)) for step in steps)

    def complete_steps(self) -> list[int]:
        """Return the steps of the pointer's line whose checkpoint has all its files, newest first."""
        line, _ = self._line(self.steps())
        return [step for step in line if self._is_complete(step)]

    def _line(self, steps: list[int]) -> tuple[list[int], list[int]]:
        """Part ``steps`` into those of the pointer's line, and those of other runs or branches.

        Of the line are the checkpoints that the pointer's descends from, and those that descend from it: a run that
        was killed before it moved the pointer has lost nothing. Without a pointer all are.
        """
        named = self.pointer()
        if named is None or named not in steps:
            return steps, []
        manifests = {step: self._manifest(step) for step in steps}
        pointed = manifests[named]
        line = [step for step in steps if _in_line(step, manifests[step], named, pointed)]
        return line, [step for step in steps if step not in line]

    def _manifest(self, step: int) -> Manifest | None:
        try:
            return read_manifest(self.storage, self.folder(step))
        except CheckpointError:
            return None

    def open(self, step: int) -> SavedCheckpoint:
        """Open the checkpoint of a step. Raises CheckpointError unless the manifest is sound and all files are there,
        with the right sizes."""
        return self._open(self.folder(step), step)

    def _open(self, folder: str, step: int | None = None) -> SavedCheckpoint:
        manifest = read_manifest(self.storage, folder)
        if step is not None and manifest.step != step:
            raise CheckpointError(f"{folder}/{MANIFEST} is of step {manifest.step}")
        check_files(self.storage, folder, manifest)
        return SavedCheckpoint(folder, manifest)

    def verify(self, folder: str) -> SavedCheckpoint:
        """Read every byte of a checkpoint and compare every hash. Raises CheckpointError, naming the file."""
        found = self._open(folder)
        check_hashes(self.storage, folder, found.manifest)
        return found

    def candidates(self) -> Iterator[SavedCheckpoint]:
        """Yield the checkpoints to resume from, newest first: those of the pointer's line.

        Each incomplete or damaged one is passed with a warning, and those of other runs or branches are named in one.
        """
        steps = self.steps()
        self._compare_pointer(steps)
        steps, others = self._line(steps)
        if others:
            names = ", ".join(self._name(step) for step in others[:8]) + (", …" if len(others) > 8 else "")
            warnings.warn(
                f"{self.root}: {names} belong to another run or branch than {POINTER} names: left alone. Resume one "
                "with trainer.resume_mode=from_path, or remove what is not needed; max_ckpts_to_keep counts none",
                SkyRLMegatronWarning,
                stacklevel=2,
            )
        for step in steps:
            try:
                yield self.open(step)
            except CheckpointError as error:
                warnings.warn(f"{error}: skipped, trying the one before", SkyRLMegatronWarning, stacklevel=2)

    def pointer(self) -> int | None:
        """Return the step that the pointer file names; None when it is missing or not a number."""
        try:
            return int(self.storage.read(self.storage.path(POINTER)))
        except (OSError, ValueError):
            return None

    def _compare_pointer(self, steps: list[int]) -> None:
        named = self.pointer()
        if named is None and self.storage.exists(self.storage.path(POINTER)):
            warnings.warn(
                f"{self.storage.path(POINTER)} does not hold a step: the folders are used instead",
                SkyRLMegatronWarning,
                stacklevel=3,
            )
        elif named is not None and named not in steps:
            warnings.warn(
                f"{self.storage.path(POINTER)} names step {named}, which has no folder: the newest folder is used",
                SkyRLMegatronWarning,
                stacklevel=3,
            )

    def read_json(self, checkpoint: SavedCheckpoint, name: str) -> dict[str, Any]:
        """Return ``data.json`` or ``trainer_state.json`` of a checkpoint, after its hash was checked."""
        return dict(json.loads(read_verified(self.storage, checkpoint.folder, checkpoint.manifest, name)))

    # ------------------------------------------------------------------------------------------ retention
    def prune(self, keep: int, *, sound: int | None = None) -> list[int]:
        """Remove all but the newest ``keep`` complete checkpoints of the pointer's line; returns the removed steps.

        Incomplete ones do not count. Before anything is removed, hashes are compared until one checkpoint is found
        to be sound, and that one stays; ``sound``: a step whose hashes were taken from what was just written.
        """
        if keep < 0:
            return []
        self.open_for_writing()
        complete = self.complete_steps()
        surplus = complete[max(keep, 1) :]
        if not surplus:
            return []
        if sound not in complete:
            sound = next((step for step in complete if self._is_sound(step)), None)
        removed = [step for step in surplus if step != sound and sound is not None]
        for step in removed:
            folder = self.folder(step)
            if self.storage.renames:
                self.storage.rename(folder, folder + _REMOVED)
                folder += _REMOVED
            else:
                self.storage.remove(f"{folder}/{MANIFEST}")
            self.storage.remove(folder)
        return removed

    def _is_complete(self, step: int) -> bool:
        try:
            self.open(step)
        except CheckpointError:
            return False
        return True

    def _is_sound(self, step: int) -> bool:
        try:
            self.verify(self.folder(step))
        except CheckpointError:
            return False
        return True


def _in_line(step: int, manifest: Manifest | None, named: int, pointed: Manifest | None) -> bool:
    """Return whether the checkpoint of a step is of the line of the one that the pointer names."""
    if manifest is None:  # not complete: it is met, and reported, where it would have been read
        return True
    if step <= named:
        return pointed is None or pointed.descends_from(manifest)
    # Older checkpoints know no branches: nothing says that the pointer was only not moved yet.
    return pointed is not None and bool(manifest.branch) and manifest.descends_from(pointed)


def json_bytes(value: Mapping[str, Any], name: str) -> bytes:
    """Return the content of the JSON file ``name``. Raises CheckpointError for what JSON cannot hold."""
    try:
        return json.dumps(dict(value), indent=1).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} can hold plain JSON values only: {error}") from error


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
