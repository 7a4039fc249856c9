"""``MANIFEST.json`` (files of a checkpoint, their sizes and BLAKE3 hashes, layout, versions) and a role's metadata
files.

Files are hashed in blocks, so that a rank verifies exactly the bytes that it reads. A file of one block has the hash
that ``b3sum`` prints. The manifest contains its own hash, which detects damage but is not a signature.

Ranks leave a note (``<role>/parts/<rank>.json``) when their files are complete. The process that completes the
checkpoint collects the notes. Nothing here needs a process group.
"""

from __future__ import annotations

import json
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

import blake3
import torch

from bridges.errors import BridgeError
from bridges.rows import Shape
from bridges.staging import FileWriter
from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint.storage import Storage

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


MANIFEST = "MANIFEST.json"
PARTS = "parts"
"""Folder of the notes that ranks leave for the process that completes a checkpoint."""
BLOCK_BYTES = 4 * 2**20
FORMAT = 1
RESTORE = "restore the file, or resume another checkpoint (trainer.resume_mode=from_path)"
"""What to do about a damaged file, for messages."""


@dataclass(slots=True)
class FileEntry:
    """One file: its size and the BLAKE3 hash of each block of :data:`BLOCK_BYTES`."""

    bytes: int
    blake3: list[str]


class BlockHasher:
    """Hashes what is written to a file, block by block."""

    def __init__(self) -> None:
        self._bytes = 0
        self._done: list[str] = []
        self._open = blake3.blake3()

    def update(self, data: memoryview | bytes) -> None:
        """Hash the next bytes of the file."""
        view = memoryview(data).cast("B")
        while len(view):
            left = BLOCK_BYTES - self._bytes % BLOCK_BYTES
            part, view = view[:left], view[left:]
            self._open.update(part)
            self._bytes += len(part)
            if len(part) == left:
                self._done.append(self._open.hexdigest())
                self._open = blake3.blake3()

    def entry(self) -> FileEntry:
        """Size and hashes of all bytes so far."""
        # an empty file has the hash of nothing: each file has one at least, so none escapes the check
        tail = [self._open.hexdigest()] if self._bytes % BLOCK_BYTES or not self._bytes else []
        return FileEntry(self._bytes, self._done + tail)


def hash_bytes(data: bytes) -> FileEntry:
    """Return the entry of a file with this content."""
    hasher = BlockHasher()
    hasher.update(data)
    return hasher.entry()


@dataclass(slots=True)
class Manifest:
    """The content of a complete checkpoint."""

    step: int
    files: dict[str, FileEntry]
    """Path within the checkpoint → entry. The manifest itself is not listed."""
    layouts: dict[str, dict[str, int]]
    """Role (``policy``, ``critic``) → degrees of the layout that saved it, with ``world_size``."""
    versions: dict[str, str] = field(default_factory=dict)
    hub_commits: dict[str, str] = field(default_factory=dict)
    """Repository of the Hugging Face hub → commit that the run read (``trainer.hub_commits``)."""
    bases: dict[str, str] = field(default_factory=dict)
    """Role → fingerprint of the base weights of its saved adapters (``bridges.files.weights_fingerprint``)."""
    branch: str = ""
    """Id of the branch that saved it: the training since a start or resume. Empty in older checkpoints."""
    ancestry: dict[str, int] = field(default_factory=dict)
    """Branch that this one continues → the step at which it was left."""
    identity: dict[str, dict[str, str]] = field(default_factory=dict)
    """What the run depends on (``identity.py``): name → ``shown`` and ``digest``. Empty in older
    checkpoints."""

    def descends_from(self, other: Manifest) -> bool:
        """Return whether this checkpoint is ``other``, or its training passed through ``other``."""
        if self.branch == other.branch:
            return other.step <= self.step
        return other.step <= self.ancestry.get(other.branch, -1)

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "layouts": self.layouts,
            "versions": self.versions,
            "hub_commits": self.hub_commits,
            "bases": self.bases,
            "branch": self.branch,
            "ancestry": self.ancestry,
            "identity": self.identity,
            "block_bytes": BLOCK_BYTES,
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
        }
        # the hash of the others: it cannot be in what it hashes
        return json.dumps(body | {"self": _self_hash(body)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Manifest:
        """Parse and check. Raises CheckpointError if it is damaged, has another format, or names files outside of the
        checkpoint."""
        try:
            body = json.loads(data)
            stated = body.pop("self")
            intact = stated == _self_hash(body)
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); {RESTORE}") from error
        if not intact:
            raise CheckpointError(f"{path} is damaged: its content does not match its own hash; {RESTORE}")
        if body.get("format") != FORMAT or body.get("block_bytes") != BLOCK_BYTES:
            raise CheckpointError(
                f"{path} has format {body.get('format')}, this version reads {FORMAT}: resume with the version that "
                "saved it"
            )
        absent = {"hub_commits": {}, "bases": {}, "branch": "", "ancestry": {}, "identity": {}}  # in older checkpoints
        filled = absent | body
        # the hash shows damage, not who wrote the file: types are checked before anything uses them
        if wrong := [name for name, fits in _FIELDS.items() if not fits(filled.get(name))]:
            raise CheckpointError(
                f"{path} is not a valid manifest: wrong type or value of {', '.join(wrong)}; {RESTORE}"
            )
        files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
        for name in files:
            # a manifest may come from a stranger: paths in it must not lead to other files
            if name.startswith("/") or ".." in name.split("/"):
                raise CheckpointError(f"{path} names {name}, which is outside of the checkpoint: refused")
        return cls(
            body["step"],
            files,
            body["layouts"],
            body["versions"],
            hub_commits=filled["hub_commits"],
            bases=filled["bases"],
            branch=filled["branch"],
            ancestry=filled["ancestry"],
            identity=filled["identity"],
        )

    def roles(self) -> list[str]:
        """Return the roles in the checkpoint, sorted."""
        return sorted(self.layouts)


def _is_file(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"bytes", "blake3"}
        and type(entry["bytes"]) is int
        and entry["bytes"] >= 0
        and isinstance(entry["blake3"], list)
        and all(isinstance(block, str) for block in entry["blake3"])
    )


def _all_are(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(type(inner) is kind for inner in value.values())


def _is_part(value: Any) -> bool:
    return _all_are(str)(value) and value.keys() == {"shown", "digest"}


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: type(value) is int and value >= 0,
    "files": lambda value: isinstance(value, dict) and all(map(_is_file, value.values())),
    "layouts": lambda value: isinstance(value, dict) and all(map(_all_are(int), value.values())),
    "versions": _all_are(str),
    "hub_commits": _all_are(str),
    "bases": _all_are(str),
    "branch": lambda value: isinstance(value, str),
    "ancestry": _all_are(int),
    "identity": lambda value: isinstance(value, dict) and all(map(_is_part, value.values())),
}
"""Key of a manifest → whether a value is valid. The hash alone does not show who wrote the manifest."""


def _self_hash(body: dict[str, Any]) -> str:
    return blake3.blake3(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that wrote the checkpoint."""
    packages = ("torch", "megatron-core", "skyrl-megatron", "numpy")
    return {"python": platform.python_version()} | {name: _version(name) for name in packages}


def _version(package: str) -> str:
    """Return the installed version; "not installed" for a source tree on PYTHONPATH."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Return the manifest of a checkpoint folder. Raises CheckpointError if it is missing or damaged."""
    path = f"{folder}/{MANIFEST}"
    storage.refuse_escape(folder, path)
    try:
        data = storage.read(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is not a complete checkpoint; give a folder global_step_N that has one"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); check the storage") from error
    return Manifest.from_bytes(data, path)


def check_files(storage: Storage, folder: str, manifest: Manifest) -> None:
    """Raise CheckpointError unless every listed file exists, is inside of the folder, and has the right size."""
    for name, entry in manifest.files.items():
        path = f"{folder}/{name}"
        storage.refuse_escape(folder, path)
        try:
            size = storage.size(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing; {RESTORE}") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error}); check the storage") from error
        if size != entry.bytes:
            raise CheckpointError(f"{path} has {size} bytes instead of {entry.bytes}; {RESTORE}")


def check_block(path: str, index: int, data: memoryview, expected: str) -> None:
    """Raise CheckpointError if a block does not have its hash."""
    # of the bytes that were read: hashing the file apart would not show what changes in between
    if blake3.blake3(data).hexdigest() != expected:
        raise CheckpointError(
            f"{path} is damaged between bytes {index * BLOCK_BYTES} and {(index + 1) * BLOCK_BYTES}; {RESTORE}"
        )


def check_hashes(storage: Storage, folder: str, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Read the files (default: all) and compare every hash. Raises CheckpointError."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for name in manifest.files if names is None else names:
        path, entry = f"{folder}/{name}", manifest.files[name]
        with storage.open(path) as file:
            for index, expected in enumerate(entry.blake3):
                count = read_into(file, buffer[: min(BLOCK_BYTES, entry.bytes - index * BLOCK_BYTES)], path)
                check_block(path, index, buffer[:count], expected)


def read_into(file: Any, buffer: memoryview, path: str) -> int:
    """Fill ``buffer`` and return its size. Raises CheckpointError if the file ends early or cannot be read."""
    filled = 0
    while filled < len(buffer):
        try:
            count = file.readinto(buffer[filled:])
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error}); check the storage") from error
        if not count:
            raise CheckpointError(f"{path} is truncated; {RESTORE}")
        filled += count
    return filled


def read_verified(storage: Storage, folder: str, manifest: Manifest, name: str) -> bytes:
    """Return the content of a small file of the checkpoint after checking its hash. Raises CheckpointError."""
    path = f"{folder}/{name}"
    if name not in manifest.files:
        raise CheckpointError(f"{path} is not listed in the checkpoint's {MANIFEST}; resume another checkpoint")
    storage.refuse_escape(folder, path)
    try:
        data = storage.read(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); check the storage") from error
    if hash_bytes(data) != manifest.files[name]:
        raise CheckpointError(f"{path} is damaged: its hash differs from the manifest's; {RESTORE}")
    return data


STATE = "state.json"
_AFTER_EXIT_S = (
    60.0  # after the main thread has ended, other ranks may be gone: do not keep the process alive for long
)

RankNote = dict[str, Any]


def wait_for_notes(storage: Storage, folder: str, role: str, world_size: int, timeout_s: float) -> list[RankNote]:
    """Wait for the notes of all ranks of a role and return them. Raises CheckpointError if a rank failed or is
    late."""
    parts = f"{folder}/{role}/{PARTS}"
    began, pause = time.monotonic(), 0.005
    exited: float | None = None
    while True:
        names = set(storage.names(parts))
        # a failed rank first: waiting for its note would end in a timeout without the reason
        for name in sorted(names):
            if name.endswith(".failed"):
                raise CheckpointError(storage.read(f"{parts}/{name}").decode(errors="replace"))
        late = [rank for rank in range(world_size) if f"{rank}.json" not in names]
        if not late:
            return [json.loads(storage.read(f"{parts}/{rank}.json")) for rank in range(world_size)]
        now = time.monotonic()
        # At exit the interpreter waits for this thread. Ranks of a run that ends may never write their notes.
        if exited is None and not threading.main_thread().is_alive():
            exited = now
        if now - began > timeout_s or (exited is not None and now - exited > _AFTER_EXIT_S):
            raise CheckpointError(
                f"{folder}: {role} ranks {late} have not written within {now - began:.0f} s; check the storage from "
                "their nodes"
            )
        time.sleep(pause)
        # from 5 ms, because small models are written at once, to 0.25 s: listing an object store costs a
        # request
        pause = min(pause * 1.5, 0.25)


def complete_role(storage: Storage, folder: str, role: str, notes: list[RankNote]) -> dict[str, FileEntry]:
    """Write the role's common files, remove the notes, and return all files of the role (paths from ``folder``).

    Raises CheckpointError if the ranks' chunks do not cover every tensor exactly once, or ranks disagree.
    """
    from bridges.torch_dist import FORMAT  # imports torch.distributed.checkpoint, which would slow down the start

    target = f"{folder}/{role}"
    metadata = _metadata(notes, target)
    # None: the role has no optimizer
    counts = {note["optimizer_step"] for note in notes if note["optimizer_step"] is not None}
    if len(counts) > 1 or len({note["step"] for note in notes}) != 1:
        raise CheckpointError(
            f"{target}: the ranks are at different steps; this is a bug in the training loop: report it, and resume "
            "the checkpoint before it"
        )
    state = {
        "step": notes[0]["step"],
        "layout": notes[0]["layout"],
        "optimizer_step": counts.pop() if counts else None,
        "lr_schedule": notes[0]["lr_schedule"],
    }
    slots = [note.get("experts", {}) for note in notes]
    if any(slot != slots[0] for slot in slots):
        raise CheckpointError(
            f"{target}: the ranks place experts differently; this is a bug in the training loop: report it, and "
            "resume the checkpoint before it"
        )
    if slots[0]:
        state["experts"] = slots[0]
    files = {name: FileEntry(**entry) for note in notes for name, entry in note["files"].items()}
    for name, data in {
        # torch's own loader expects a pickle; this package reads it back through an allow-list
        # (bridges.metadata)
        ".metadata": pickle.dumps(metadata),
        "metadata.json": json.dumps(FORMAT).encode(),
        STATE: json.dumps(state, indent=1).encode(),
    }.items():
        storage.write(f"{target}/{name}", data)
        files[name] = hash_bytes(data)
    # the last trace of the notes goes before the manifest, so a complete checkpoint has none
    storage.remove(f"{target}/{PARTS}")
    storage.sync_folder(target)
    return {f"{role}/{name}": entry for name, entry in files.items()}


def _metadata(notes: list[RankNote], target: str) -> Metadata:
    """Return torch's metadata of all chunks of all ranks, in an order that does not depend on the ranks."""
    from bridges.torch_dist import Chunk, build_metadata

    kinds: dict[str, tuple[Shape, torch.dtype]] = {}
    for note in notes:
        for key, (dtype, shape) in note["tensors"].items():
            kind = (tuple(shape), getattr(torch, dtype))
            if kinds.setdefault(key, kind) != kind:
                raise CheckpointError(
                    f"{target}: ranks have {key} as {kinds[key]} and as {kind}; all ranks must run "
                    "one model and one version"
                )
    written = [
        (key, Chunk(tuple(offsets), tuple(sizes), file, start, length))
        for note in notes
        for key, offsets, sizes, file, start, length in note["chunks"]
    ]
    try:
        return build_metadata(dict(sorted(kinds.items())), written)
    except BridgeError as error:
        raise CheckpointError(f"{target}: {error}") from error


class HashedFile:
    """A sequentially written file (a :class:`FileWriter`) that computes its entry of the manifest on the way."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file
        self._hasher = BlockHasher()

    def write(self, *parts: memoryview | bytes) -> None:
        self._file.write(*parts)
        for part in parts:
            self._hasher.update(part)

    def finish(self) -> None:
        self._file.finish()

    def abandon(self) -> None:
        self._file.abandon()

    def entry(self) -> FileEntry:
        """Return size and hashes of all bytes so far."""
        return self._hasher.entry()
