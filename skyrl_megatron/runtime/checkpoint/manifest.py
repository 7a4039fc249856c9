"""``MANIFEST.json``: which files a checkpoint has, their sizes and BLAKE3 hashes, the layout and the versions.

Files are hashed in blocks, so that a rank can verify exactly the bytes it reads. A file of one block has the hash that
``b3sum`` prints. The manifest carries the hash of itself. It detects damage; it is not a signature.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import blake3

from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint.storage import Storage

MANIFEST = "MANIFEST.json"
PARTS = "parts"
"""Folder of the notes that ranks leave for whoever completes a checkpoint."""
BLOCK_BYTES = 4 * 2**20
FORMAT = 1


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
        """Take the next bytes of the file."""
        view = memoryview(data).cast("B")
        while len(view):
            room = BLOCK_BYTES - self._bytes % BLOCK_BYTES
            part, view = view[:room], view[room:]
            self._open.update(part)
            self._bytes += len(part)
            if len(part) == room:
                self._done.append(self._open.hexdigest())
                self._open = blake3.blake3()

    def entry(self) -> FileEntry:
        """Size and hashes of all bytes so far."""
        tail = [self._open.hexdigest()] if self._bytes % BLOCK_BYTES or not self._bytes else []
        return FileEntry(self._bytes, self._done + tail)


def hash_bytes(data: bytes) -> FileEntry:
    """Return the entry of a file with this content."""
    hasher = BlockHasher()
    hasher.update(data)
    return hasher.entry()


@dataclass(slots=True)
class Manifest:
    """What a complete checkpoint consists of."""

    step: int
    files: dict[str, FileEntry]
    """Path within the checkpoint → entry. The manifest itself is not listed."""
    layouts: dict[str, dict[str, int]]
    """Role (``policy``, ``critic``) → degrees of the layout that wrote it, with ``world_size``."""
    versions: dict[str, str] = field(default_factory=dict)
    hub_commits: dict[str, str] = field(default_factory=dict)
    """Repository of the Hugging Face hub → commit that the run read (``trainer.hub_commits``)."""
    bases: dict[str, str] = field(default_factory=dict)
    """Role → fingerprint of the weights that its saved adapters are added to (``runtime/lora/base.py``)."""
    branch: str = ""
    """The stretch of training, from a start or resume on, that saved it. Empty in older checkpoints."""
    ancestry: dict[str, int] = field(default_factory=dict)
    """Branches that this one continues → the step at which each was left."""

    def descends_from(self, other: Manifest) -> bool:
        """Return whether the training that saved this passed through the checkpoint ``other``, or is it."""
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
            "block_bytes": BLOCK_BYTES,
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
        }
        return json.dumps(body | {"self": _self_hash(body)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Manifest:
        """Parse and check. Raises CheckpointError when damaged, of another format, or naming files outside."""
        try:
            body = json.loads(data)
            stated = body.pop("self")
            intact = stated == _self_hash(body)
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged ({error})") from error
        if not intact:
            raise CheckpointError(f"{path} is damaged: its content does not have the hash that it states")
        if body.get("format") != FORMAT or body.get("block_bytes") != BLOCK_BYTES:
            raise CheckpointError(f"{path} has format {body.get('format')}, this version reads {FORMAT}")
        filled = {"hub_commits": {}, "bases": {}, "branch": "", "ancestry": {}} | body  # which older checkpoints lack
        if wrong := [name for name, fits in _FIELDS.items() if not fits(filled.get(name))]:
            raise CheckpointError(f"{path} is none of ours: {', '.join(wrong)} is not what it should be: refused")
        files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
        for name in files:
            if name.startswith("/") or ".." in name.split("/"):
                raise CheckpointError(f"{path} names {name}, outside of the checkpoint: refused")
        return cls(
            body["step"],
            files,
            body["layouts"],
            body["versions"],
            hub_commits=filled["hub_commits"],
            bases=filled["bases"],
            branch=filled["branch"],
            ancestry=filled["ancestry"],
        )

    def roles(self) -> list[str]:
        """Return roles in the checkpoint."""
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


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: type(value) is int and value >= 0,
    "files": lambda value: isinstance(value, dict) and all(map(_is_file, value.values())),
    "layouts": lambda value: isinstance(value, dict) and all(map(_all_are(int), value.values())),
    "versions": _all_are(str),
    "hub_commits": _all_are(str),
    "bases": _all_are(str),
    "branch": lambda value: isinstance(value, str),
    "ancestry": _all_are(int),
}
"""Key of a manifest → whether a value can be its. The hash of a manifest is right for whoever wrote it."""


def _self_hash(body: dict[str, Any]) -> str:
    return blake3.blake3(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return versions that a reader of the checkpoint may want to know."""
    packages = ("torch", "megatron-core", "skyrl-megatron", "numpy")
    return {"python": platform.python_version()} | {name: _version(name) for name in packages}


def _version(package: str) -> str:
    """Return the installed version; "not installed" for code that runs from a source tree on PYTHONPATH."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Return the manifest of a checkpoint folder. Raises CheckpointError when there is none or it is damaged."""
    path = f"{folder}/{MANIFEST}"
    storage.refuse_escape(folder, path)
    try:
        data = storage.read(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder} has no {MANIFEST}: not a complete checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    return Manifest.from_bytes(data, path)


def check_files(storage: Storage, folder: str, manifest: Manifest) -> None:
    """Raise CheckpointError unless every listed file is there, inside of the folder, and of the right size."""
    for name, entry in manifest.files.items():
        path = f"{folder}/{name}"
        storage.refuse_escape(folder, path)
        try:
            size = storage.size(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error
        if size != entry.bytes:
            raise CheckpointError(f"{path} has {size} bytes instead of {entry.bytes}")


def check_block(path: str, index: int, data: memoryview, expected: str) -> None:
    """Raise CheckpointError when a block does not have its hash."""
    if blake3.blake3(data).hexdigest() != expected:
        raise CheckpointError(f"{path} is damaged between bytes {index * BLOCK_BYTES} and {(index + 1) * BLOCK_BYTES}")


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
    """Fill ``buffer``. Raises CheckpointError when the file ends or fails before."""
    filled = 0
    while filled < len(buffer):
        try:
            count = file.readinto(buffer[filled:])
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error
        if not count:
            raise CheckpointError(f"{path} is truncated")
        filled += count
    return filled


def read_verified(storage: Storage, folder: str, manifest: Manifest, name: str) -> bytes:
    """Return a small file of the checkpoint, after its hash was checked. Raises CheckpointError."""
    path = f"{folder}/{name}"
    if name not in manifest.files:
        raise CheckpointError(f"{path} is not a part of the checkpoint")
    storage.refuse_escape(folder, path)
    try:
        data = storage.read(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if hash_bytes(data) != manifest.files[name]:
        raise CheckpointError(f"{path} is damaged: it does not have the hash of the manifest")
    return data
