"""Versions of a model's weights in a folder or an object store, each as what changed since the one before.

``<root>/<number>-base`` holds all tensors, ``<root>/<number>-delta`` the elements that changed (``changes.py``): in
``data`` one tensor after the other, and, written last, in ``manifest.json`` what is where, a hash of every tensor as
it is afterwards, and the hash of the manifest before. A folder without a manifest is what a writer left that died:
readers do not see it, and the next writer removes it. Readers take up any version that follows what they have, and
begin with a base otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from blake3 import blake3
from torch import Tensor

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.runtime.checkpoint.storage import Storage, open_storage
from skyrl_megatron.weight_sync.changes import TensorChange, apply_change, bits_of, change_of
from skyrl_megatron.weight_sync.source import dtype_name

BASE_EVERY, BASES_KEPT = 20, 2
MANIFEST, DATA = "manifest.json", "data"


@dataclass(frozen=True, slots=True)
class Published:
    """What one version took."""

    number: int
    base: bool
    nbytes: int
    changed: int
    """Elements."""
    elements: int


class VersionReader:
    """The newest weights of ``root`` that were read, in :attr:`tensors` (CPU)."""

    def __init__(self, root: str | Path) -> None:
        self.storage = open_storage(root)
        self.tensors: dict[str, Tensor] = {}
        self.number, self.version, self.chain = 0, "", ""
        """Of what was read; 0: nothing. ``chain``: hash of its manifest."""

    def update(self) -> list[str]:
        """Read up to the newest version; return the tensors that changed.

        Raises WeightSyncError for what is damaged, missing or of another chain; nothing is held then, and the next
        update begins with a base.
        """
        names = version_names(self.storage)
        if not names:
            raise WeightSyncError(f"{self.storage.root} holds no version of any weights: nothing was published there")
        changed: set[str] = set()
        try:
            for name in self._following(names):
                changed |= self._read(name)
        except BaseException:
            self.tensors, self.number, self.chain = {}, 0, ""
            raise
        return [name for name in self.tensors if name in changed]

    def _following(self, names: Sequence[str]) -> Sequence[str]:
        newer = [name for name in names if number_of(name) > self.number]
        if not newer or (self.number and number_of(newer[0]) == self.number + 1):
            return newer
        bases = [place for place, name in enumerate(names) if name.endswith("-base")]
        if not bases:
            raise WeightSyncError(f"{self.storage.root} has no base that {names[-1]} could be made from: publish anew")
        return names[bases[-1] :]

    def _read(self, name: str) -> set[str]:
        """Take on one version; return the tensors that changed."""
        path, base = self.storage.path(name), name.endswith("-base")
        text = self.storage.read(self.storage.path(name, MANIFEST))
        try:
            manifest: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise WeightSyncError(f"{path}/{MANIFEST} is damaged ({error}): remove {path} and all after it") from error
        if not base and (manifest["previous"], manifest["number"]) != (self.chain, self.number + 1):
            raise WeightSyncError(f"{path} does not follow version {self.number} as it was read: it is of another run")
        tensors = {} if base else self.tensors
        changed = set()
        with self.storage.open(self.storage.path(name, DATA)) as file:
            for entry in manifest["tensors"]:
                if self._take(entry, tensors, file, path):
                    changed.add(entry["name"])
        listed = {entry["name"] for entry in manifest["tensors"]}
        self.tensors = {key: tensor for key, tensor in tensors.items() if key in listed}
        self.number, self.version, self.chain = manifest["number"], manifest["version"], blake3(text).hexdigest()
        return changed

    def _take(self, entry: dict[str, Any], tensors: dict[str, Tensor], file: IO[bytes], path: str) -> bool:
        """Take on one tensor's change; return whether there is one."""
        key = entry["name"]
        change = TensorChange(entry["count"], entry["gap_bytes"], _exactly(file, entry["nbytes"]))
        if change.count == 0:
            return False
        if key not in tensors or change.count < 0:
            tensors[key] = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        apply_change(change, tensors[key], f"{path}: {key}")
        if (found := hash_of(tensors[key])) != entry["hash"]:
            raise WeightSyncError(
                f"{path}: {key} is not what was published (hash {found[:12]}…, published {entry['hash'][:12]}…): the "
                "data are damaged; remove this version and all after it, and publish a base"
            )
        return True


class VersionWriter:
    """Publishes one version after another under ``root``; goes on behind what is there.

    It holds the last version in memory. Every ``base_every`` versions all tensors are written, and versions before the
    last :data:`BASES_KEPT` bases are removed.
    """

    def __init__(self, root: str | Path, base_every: int = BASE_EVERY) -> None:
        self.storage, self.base_every = open_storage(root), base_every
        self._remove_unfinished()
        self._last = VersionReader(root)
        if version_names(self.storage):
            self._last.update()

    def publish(self, version: str, tensors: Iterable[tuple[str, Tensor]]) -> Published:
        """Publish ``tensors`` as ``version``. Until this returns, readers see the version before."""
        last = self._last
        number = last.number + 1
        names = version_names(self.storage)
        if names and number_of(names[-1]) >= number:
            raise WeightSyncError(
                f"{self.storage.root} has {names[-1]} of another writer: one publishes there at a time"
            )
        since = next((place for place, name in enumerate(reversed(names)) if name.endswith("-base")), self.base_every)
        base = since + 1 >= self.base_every or not last.number
        name = f"{number:08d}-{'base' if base else 'delta'}"
        self.storage.remove(self.storage.path(name))  # of an attempt that failed
        self.storage.make_folder(self.storage.path(name))
        entries, held = [], {}
        file = self.storage.create(self.storage.path(name, DATA))
        try:
            for key, tensor in tensors:
                new = tensor.detach().cpu().contiguous()
                old = None if base else _same_kind(last.tensors.get(key), new)
                change = change_of(old, new)
                file.write(change.payload)
                held[key] = new.clone() if change.count else last.tensors[key]
                entries.append(_entry(key, new, change))
            file.finish()
        except BaseException:
            file.abandon()
            raise
        manifest = {"number": number, "version": version, "previous": last.chain, "tensors": entries}
        text = json.dumps(manifest).encode()
        self.storage.write(self.storage.path(name, MANIFEST), text)
        last.number, last.version, last.tensors, last.chain = number, version, held, blake3(text).hexdigest()
        self._remove_old()
        elements = sum(tensor.numel() for tensor in held.values())
        changed = sum(entry["changed"] for entry in entries)
        return Published(number, base, sum(entry["nbytes"] for entry in entries) + len(text), changed, elements)

    def _remove_unfinished(self) -> None:
        finished = set(version_names(self.storage))
        for name in self.storage.names(self.storage.root):
            if name.endswith(("-base", "-delta")) and name not in finished:
                self.storage.remove(self.storage.path(name))

    def _remove_old(self) -> None:
        names = version_names(self.storage)
        bases = [place for place, name in enumerate(names) if name.endswith("-base")]
        for name in names[: bases[-BASES_KEPT]] if len(bases) > BASES_KEPT else ():
            self.storage.remove(self.storage.path(name, MANIFEST))  # first: no reader begins with the rest
            self.storage.remove(self.storage.path(name))


def version_names(storage: Storage) -> list[str]:
    """List the versions that are whole, oldest first."""
    found = [name for name in storage.names(storage.root) if name.endswith(("-base", "-delta"))]
    return [name for name in sorted(found) if storage.exists(storage.path(name, MANIFEST))]


def number_of(name: str) -> int:
    """Return the number in a version's name."""
    return int(name.partition("-")[0])


def hash_of(tensor: Tensor) -> str:
    """Return the hash of a tensor's bytes."""
    return blake3(bits_of(tensor).numpy().tobytes()).hexdigest()


def _same_kind(old: Tensor | None, new: Tensor) -> Tensor | None:
    return old if old is not None and (old.shape, old.dtype) == (new.shape, new.dtype) else None


def _entry(key: str, tensor: Tensor, change: TensorChange) -> dict[str, Any]:
    return {
        "name": key,
        "dtype": dtype_name(tensor),
        "shape": list(tensor.shape),
        "count": change.count,
        "changed": tensor.numel() if change.count < 0 else change.count,
        "gap_bytes": change.gap_bytes,
        "nbytes": len(change.payload),
        "hash": hash_of(tensor) if change.count else "",
    }


def _exactly(file: IO[bytes], nbytes: int) -> bytes:
    """Read ``nbytes``, or what is left; a short read of an unbuffered file is no end."""
    parts = []
    while nbytes and (part := file.read(nbytes)):
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)
