"""The folder of a run's checkpoints: which are complete, which is the newest, and which one a run resumes from.

    <root>/latest_ckpt_global_step.txt           the pointer: the newest complete step, for people and tools
    <root>/best_ckpt.json                        the checkpoint of the best evaluation (trainer.best_metric), if marked
    <root>/global_step_<N>/MANIFEST.json         written last: a folder without it is not a checkpoint
    <root>/global_step_<N>/{data,trainer_state}.json, rollouts.bin if unfinished rollouts are kept
    <root>/global_step_<N>/{policy,critic}/      torch_dist: .metadata, metadata.json, __<rank>_0.distcp,
                                                 state.json, rng_<rank>.safetensors
    <root>/global_step_<N>/<role>/adapter/       LoRA adapters, independent of the layout (safetensors)

A save writes shards, then the manifest, renames the folder from ``global_step_<N>.tmp``, writes the pointer, and
prunes older checkpoints. Each stage is durable before the next begins, so a process may die at any time. The process
that drives a store need not be a rank.

A folder may hold checkpoints of several runs, or of several branches of a run: a run that starts anew or resumes from
an earlier step leaves the existing checkpoints, even those of higher steps. The pointer names a checkpoint of the
current branch, and each manifest lists the branches that its own branch continues. The ancestors and descendants of
the pointer's checkpoint are the pointer's line. Resume and retention only consider this line.
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

from skyrl_megatron.data.folder_lock import FolderLock
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
from skyrl_megatron.runtime.checkpoint.storage import LocalStorage, open_storage

logger = logging.getLogger(__name__)

POINTER = "latest_ckpt_global_step.txt"
BEST = "best_ckpt.json"
DATA = "data.json"
TRAINER_STATE = "trainer_state.json"
ROLLOUTS = "rollouts.bin"
_STEP = re.compile(r"global_step_(\d+)")
_TMP, _REPLACED, _REMOVED = ".tmp", ".replaced", ".removed"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The folder and manifest of a complete checkpoint. Files are verified when they are read."""

    folder: str
    manifest: Manifest

    @property
    def step(self) -> int:
        """Training step after which it was saved."""
        return self.manifest.step


class CheckpointStore:
    """All checkpoints under ``root``, a folder or an ``s3://``/``gs://`` address.

    Reading needs no lock. The first :meth:`begin` takes the lock of a folder until :meth:`close`. An object store has
    neither locks nor renames: the caller must ensure that there is one writer, and saving a step again removes its old
    checkpoint first. ``keep``: number of checkpoints to keep; -1: all. ``hub_commits`` and ``identity`` are recorded
    in every manifest.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        keep: int = -1,
        hub_commits: Mapping[str, str] | None = None,
        identity: Mapping[str, dict[str, str]] | None = None,
    ) -> None:
        self.storage = open_storage(root)
        self.root = self.storage.root
        self.keep, self.hub_commits = keep, dict(hub_commits or {})
        self.identity = dict(identity or {})
        self._lock: FolderLock | None = None
        # a branch per process: two runs that resume one checkpoint must not take each other's later steps for
        # their own
        self._branch, self._ancestry = uuid.uuid4().hex, dict[str, int]()

    # ------------------------------------------------------------------------------------------ writing
    def continue_from(self, checkpoint: SavedCheckpoint) -> None:
        """Save later steps as a branch that continues ``checkpoint``. Without this call, a new branch starts."""
        manifest = checkpoint.manifest
        self._branch, self._ancestry = uuid.uuid4().hex, manifest.ancestry | {manifest.branch: manifest.step}
        if open_storage(checkpoint.folder).root != self.folder(manifest.step):
            self._ancestry.pop("", None)  # older checkpoints (without a branch) of another folder are not of this line

    def begin(self, step: int, roles: Mapping[str, int], *, last_step_finite: bool = True) -> str | None:
        """Create and return the folder into which the ranks of ``roles`` (role → number of ranks) write step ``step``.

        Returns None, with a warning, if the gradient or loss of the step was not finite. Raises CheckpointError if the
        folder cannot be written or another run writes it.
        """
        if not last_step_finite:
            warnings.warn(
                f"step {step} was not finite: it is not saved as a checkpoint", SkyRLMegatronWarning, stacklevel=2
            )
            return None
        folder = self.storage.path(self._name(step, writing=True))
        try:
            self.open_for_writing()
            # what a killed save of this step left, whose files the ranks could not create again
            self.storage.remove(folder)
            for role in roles:
                self.storage.make_folder(f"{folder}/{role}/{PARTS}")
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be created ({error.strerror}); check trainer.ckpt_path") from error
        return folder

    def commit(
        self,
        step: int,
        roles: Mapping[str, int],
        extras: Mapping[str, bytes],
        *,
        timeout_s: float,
    ) -> str:
        """Wait for all ranks, complete the folder, and make it the newest checkpoint. Return its path.

        ``extras``: contents of :data:`DATA`, :data:`TRAINER_STATE`, and small files in a role's folder. On failure it
        removes the folder of this step, keeps older checkpoints, and raises CheckpointError.
        """
        folder = self.storage.path(self._name(step, writing=True))
        try:
            manifest = self._complete(step, folder, roles, extras, timeout_s)
            final = self._publish(step, folder, manifest)
        except (OSError, CheckpointError) as error:
            self.discard(step)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{error.filename or folder} cannot be written ({error.strerror}); free space or check "
                "trainer.ckpt_path"
            ) from error
        try:
            # the pointer after the folder: it must never name what is not complete
            self.storage.write(self.storage.path(POINTER), f"{step}\n".encode())
            # only now, when the new checkpoint is durable, older ones may go
            self.prune(self.keep, intact=step)
        except OSError as error:
            raise CheckpointError(
                f"{self.root}: {error.strerror}; step {step} is saved, but {POINTER} is stale or old steps remain: "
                "check the storage, then resume"
            ) from error
        return final

    def mark_lost(self, step: int, role: str, ranks: Iterable[int]) -> None:
        """Record that the lost ``ranks`` will not finish the save that is in progress."""
        folder = self.storage.path(self._name(step, writing=True), role, PARTS)
        for rank in ranks:
            if not self.storage.exists(f"{folder}/{rank}.json"):
                self.storage.write(f"{folder}/{rank}.failed", f"rank {rank} was lost".encode())

    def discard(self, step: int) -> None:
        """Remove the folder of an incomplete save."""
        folder = self.storage.path(self._name(step, writing=True))
        # without renames the folder of this step may be an older, complete checkpoint
        if self.storage.renames or not self.storage.exists(f"{folder}/{MANIFEST}"):
            self.storage.remove(folder)

    def open_for_writing(self) -> None:
        """Take the lock and clean up after a killed run: remove incomplete saves, restore a checkpoint whose
        replacement did not finish. Raises CheckpointError if another run writes here."""
        if self._lock is not None or not isinstance(self.storage, LocalStorage):
            return
        self.storage.make_folder(self.root)
        self._lock = FolderLock(self.root)
        for name in self.storage.names(self.root):
            if not _STEP.match(name):
                continue
            # nothing here was ever complete, or it was already being removed
            if name.endswith((_TMP, _REMOVED)):
                logger.warning("%s: removed, because a run was interrupted while writing it", self.storage.path(name))
                self.storage.remove(self.storage.path(name))
            elif name.endswith(_REPLACED):
                published = self.storage.path(name.removesuffix(_REPLACED))
                # the replacement was published: the old checkpoint goes. Otherwise it is the only one of this
                # step.
                if self.storage.exists(published):
                    self.storage.remove(self.storage.path(name))
                else:
                    self.storage.rename(self.storage.path(name), published)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _name(self, step: int, *, writing: bool = False) -> str:
        return f"global_step_{step}" + (_TMP if writing and self.storage.renames else "")

    def _complete(
        self, step: int, folder: str, roles: Mapping[str, int], extras: Mapping[str, bytes], timeout_s: float
    ) -> Manifest:
        manifest = Manifest(step, {}, {}, versions(), self.hub_commits, branch=self._branch, ancestry=self._ancestry)
        manifest.identity = self.identity
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
        # last: with it the folder is a checkpoint
        self.storage.write(f"{folder}/{MANIFEST}", manifest.to_bytes())
        if not self.storage.renames:
            return folder
        final = self.folder(step)
        aside = final + _REPLACED
        # moved aside and not removed: until the next rename it is the only complete one of this step
        if self.storage.exists(final):  # a step saved again, after a resume from an older one
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
        """Return the path of the complete checkpoint of a step."""
        return self.storage.path(self._name(step))

    def steps(self) -> list[int]:
        """Return the steps that have a folder, newest first; some may be incomplete."""
        names = (_STEP.fullmatch(name) for name in self.storage.names(self.root))
        return sorted((int(match[1]) for match in names if match), reverse=True)

    def has_checkpoints(self) -> bool:
        """Return whether there ever was a complete checkpoint here. A folder gets its name when it is complete; on an
        object store only a prefix with a manifest is complete."""
        steps = self.steps()
        if self.storage.renames:
            return bool(steps)
        return any(self.storage.exists(self.storage.path(self._name(step), MANIFEST)) for step in steps)

    def complete_steps(self) -> list[int]:
        """Return the steps of the line whose checkpoint has all its files, newest first."""
        line, _ = self._line(self.steps())
        return [step for step in line if self._is_complete(step)]

    def _line(self, steps: list[int]) -> tuple[list[int], list[int]]:
        """Split ``steps`` into those of the pointer's line, and those of other runs or branches.

        Descendants of the pointer's checkpoint belong to the line, because a run may be killed before it updates the
        pointer. Without a pointer all steps belong to it.
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
        """Open the checkpoint of a step. Raises CheckpointError unless the manifest is valid and all files exist with
        the right sizes."""
        return self._open(self.folder(step), step)

    def _open(self, folder: str, step: int | None = None) -> SavedCheckpoint:
        manifest = read_manifest(self.storage, folder)
        # a folder that someone copied or renamed has another step than its name
        if step is not None and manifest.step != step:
            raise CheckpointError(
                f"{folder}/{MANIFEST} belongs to step {manifest.step}, not {step}: rename the folder to its step"
            )
        check_files(self.storage, folder, manifest)
        return SavedCheckpoint(folder, manifest)

    def verify(self, folder: str) -> SavedCheckpoint:
        """Read every byte of a checkpoint and compare every hash. Raises CheckpointError with the name of the file."""
        found = self._open(folder)
        check_hashes(self.storage, folder, found.manifest)
        return found

    def candidates(self) -> Iterator[SavedCheckpoint]:
        """Yield the checkpoints of the pointer's line, newest first.

        Skips incomplete or damaged ones with a warning each, and those of other runs or branches with one warning.
        """
        steps = self.steps()
        self._compare_pointer(steps)
        steps, others = self._line(steps)
        if others:
            names = ", ".join(self._name(step) for step in others[:8]) + (", …" if len(others) > 8 else "")
            warnings.warn(
                f"{self.root}: {names} belong to another run or branch than the step in {POINTER}: they are ignored, "
                "and not counted by max_ckpts_to_keep. Resume one with trainer.resume_mode=from_path, or remove them",
                SkyRLMegatronWarning,
                stacklevel=2,
            )
        for step in steps:
            try:
                yield self.open(step)
            except CheckpointError as error:
                warnings.warn(f"{error}: skipped, trying the previous one", SkyRLMegatronWarning, stacklevel=2)

    def pointer(self) -> int | None:
        """Return the step in the pointer file; None if it is missing or not a number."""
        try:
            return int(self.storage.read(self.storage.path(POINTER)))
        except (OSError, ValueError):
            return None

    def _compare_pointer(self, steps: list[int]) -> None:
        named = self.pointer()
        if named is None and self.storage.exists(self.storage.path(POINTER)):
            warnings.warn(
                f"{self.storage.path(POINTER)} does not contain a step: the folders are used instead",
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
        """Return the verified content of ``data.json`` or ``trainer_state.json`` of a checkpoint."""
        return dict(json.loads(read_verified(self.storage, checkpoint.folder, checkpoint.manifest, name)))

    def read_rollouts(self, checkpoint: SavedCheckpoint) -> bytes | None:
        """Return the verified content of ``rollouts.bin``, None if the checkpoint has none."""
        if ROLLOUTS not in checkpoint.manifest.files:
            return None
        return read_verified(self.storage, checkpoint.folder, checkpoint.manifest, ROLLOUTS)

    # ------------------------------------------------------------------------------------------ retention
    def mark_best(self, step: int, metric: str, value: float) -> None:
        """Name the complete checkpoint of ``step`` as the best by ``metric``. :meth:`prune` keeps it."""
        manifest = self.open(step).manifest
        facts = {"step": step, "metric": metric, "value": value, "branch": manifest.branch}
        try:
            self.storage.write(self.storage.path(BEST), json_bytes(facts, BEST))
        except OSError as error:
            raise CheckpointError(
                f"{self.root}/{BEST} cannot be written ({error.strerror}); free space or check trainer.ckpt_path"
            ) from error

    def best(self) -> dict[str, Any] | None:
        """Return ``step``, ``metric`` and ``value`` of the best checkpoint of the pointer's line; None if none is
        marked, or another run has replaced it."""
        try:
            facts = dict(json.loads(self.storage.read(self.storage.path(BEST))))
            step, branch = int(facts["step"]), str(facts["branch"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        # another run may have replaced the step since it was marked
        manifest = self._manifest(step) if step in self._line(self.steps())[0] else None
        return facts if manifest is not None and manifest.branch == branch else None

    def prune(self, keep: int, *, intact: int | None = None) -> list[int]:
        """Remove all but the newest ``keep`` complete checkpoints of the pointer's line, and the best; return the
        removed steps.

        Incomplete ones do not count. Before it removes anything, it verifies checkpoints, newest first, until one is
        intact. That one is kept. ``intact``: a step that was just written and need not be verified.
        """
        if keep < 0:
            return []
        self.open_for_writing()
        complete = self.complete_steps()
        surplus = complete[max(keep, 1) :]
        if not surplus:
            return []
        # a complete checkpoint may still be damaged: without one that was read in full, nothing is removed
        if intact not in complete:
            intact = next((step for step in complete if self._is_intact(step)), None)
        best = (self.best() or {}).get("step")
        removed = [step for step in surplus if step not in (intact, best) and intact is not None]
        for step in removed:
            folder = self.folder(step)
            if self.storage.renames:
                # renamed first, as removing takes long: a checkpoint must never look complete with files
                # missing
                self.storage.rename(folder, folder + _REMOVED)
                folder += _REMOVED
            else:
                # the manifest first, for the same reason: without it the prefix is no checkpoint
                self.storage.remove(f"{folder}/{MANIFEST}")
            self.storage.remove(folder)
        return removed

    def _is_complete(self, step: int) -> bool:
        try:
            self.open(step)
        except CheckpointError:
            return False
        return True

    def _is_intact(self, step: int) -> bool:
        try:
            self.verify(self.folder(step))
        except CheckpointError:
            return False
        return True


def _in_line(step: int, manifest: Manifest | None, named: int, pointed: Manifest | None) -> bool:
    """Return whether the checkpoint of ``step`` belongs to the line of step ``named`` (manifest ``pointed``)."""
    if manifest is None:  # incomplete: it is reported when it is opened
        return True
    if step <= named:
        return pointed is None or pointed.descends_from(manifest)
    # Older checkpoints have no branch, so it is unknown whether the pointer was merely not updated yet.
    return pointed is not None and bool(manifest.branch) and manifest.descends_from(pointed)


def json_bytes(value: Mapping[str, Any], name: str) -> bytes:
    """Return the content of the JSON file ``name``. Raises CheckpointError for values that are not JSON."""
    try:
        return json.dumps(dict(value), indent=1).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} can only hold plain JSON values: {error}") from error


class Candidates(Iterator[SavedCheckpoint]):
    """The checkpoints to try, newest first. A caller that cannot load one calls :meth:`reject` and takes the next.

    Ends if there is nothing to resume. Raises CheckpointError if checkpoints exist and all were rejected: a new start
    would prune them in time.
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
        """Skip the last checkpoint, which could not be loaded. Raises CheckpointError if it was the only choice."""
        if self._only:
            raise CheckpointError(reason)
        warnings.warn(f"{reason}: skipped, trying the previous one", SkyRLMegatronWarning, stacklevel=2)


def resume_candidates(store: CheckpointStore, mode: str | None, path: str | None) -> Candidates:
    """Return the checkpoints to try for ``mode`` and ``path``. Raises CheckpointError, with the key to change, for an
    unknown mode and for a ``path`` that is not a complete checkpoint."""
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
