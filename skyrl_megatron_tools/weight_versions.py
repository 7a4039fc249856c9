"""Publish and fetch versions of a model's weights, in a folder or an object store. A version stores only the changes.

``<root>/<number>-base`` contains all tensors, ``<root>/<number>-delta`` only the changed elements. The file ``data``
has the values. ``manifest.json``, which is written last, has the layout of ``data``, a hash of each resulting tensor,
and the hash of the previous manifest. A folder without a manifest is incomplete: readers ignore it, and the next
writer removes it. A reader applies all versions after its own, or starts from the newest base.

    skyrl-megatron weight-versions publish FOLDER STORE [--name NAME] [--base-every N]
    skyrl-megatron weight-versions fetch STORE FOLDER --like FOLDER

``publish`` takes a Hugging Face folder, such as a run's export of a step (``trainer.hf_save_interval``). ``fetch``
writes the newest version to FOLDER, bitwise equal, with config and tokenizer of ``--like``. STORE is a folder, or
``s3://…`` or ``gs://…``, which need the fsspec package of that scheme. Exit code 1: nothing was published or fetched.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from bridges.errors import BridgeError
from bridges.hf_io import HfFolder, HfWriter
from bridges.source import copy_assets
from bridges.staging import staged
from skyrl_megatron.command import run_command
from skyrl_megatron.errors import LaunchError, WeightSyncError
from skyrl_megatron.runtime.checkpoint.storage import Storage, open_storage
from skyrl_megatron.weight_sync.tensors import dtype_name

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAPS = tuple(np.dtype(name) for name in ("<u1", "<u2", "<u4", "<u8"))


@dataclass(frozen=True, slots=True)
class TensorChange:
    """The difference between two versions of a tensor."""

    count: int
    """Number of changed elements; −1: all elements are stored."""
    gap_bytes: int
    """Bytes per offset between changed elements; 0 without offsets."""
    payload: bytes
    """The offsets (unless all elements are stored), then the new values."""


def change_of(old: Tensor | None, new: Tensor) -> TensorChange:
    """Return the change from ``old`` to ``new`` ([any shape], contiguous, on the CPU). ``old`` None: a new tensor.

    Elements are compared bitwise, so 0.0 and −0.0 differ. An offset is the number of unchanged elements before a
    changed one, in the smallest integer type that fits. All elements are stored if that takes no more bytes.
    """
    bits = bits_of(new)
    if old is None:
        return TensorChange(-1, 0, bits.numpy().tobytes())
    places = (bits_of(old) != bits).nonzero().flatten().numpy()
    if not len(places):
        return TensorChange(0, 0, b"")
    gaps = np.diff(places, prepend=-1) - 1
    width = next(dtype for dtype in _GAPS if gaps.max() <= np.iinfo(dtype).max)
    if len(places) * (width.itemsize + new.element_size()) >= new.nbytes:
        return TensorChange(-1, 0, bits.numpy().tobytes())
    return TensorChange(len(places), width.itemsize, gaps.astype(width).tobytes() + bits.numpy()[places].tobytes())


def apply_change(change: TensorChange, tensor: Tensor, name: str) -> None:
    """Apply a change to a tensor [any shape] in place. Raises WeightSyncError for a payload that does not fit it."""
    bits = bits_of(tensor).numpy()
    size = bits.itemsize
    if change.count < 0:
        if len(change.payload) != bits.nbytes:
            raise WeightSyncError(
                f"{name}: {len(change.payload)} bytes are stored for a tensor of {bits.nbytes} bytes"
            )
        bits[:] = np.frombuffer(change.payload, bits.dtype)
        return
    if len(change.payload) != change.count * (change.gap_bytes + size):
        raise WeightSyncError(f"{name}: {len(change.payload)} bytes are stored for {change.count} changed elements")
    if not change.count:
        return
    gaps: NDArray[np.uint64] = np.frombuffer(change.payload, f"<u{change.gap_bytes}", change.count).astype(np.uint64)
    places = np.cumsum(gaps + np.uint64(1)) - np.uint64(1)
    if places[-1] >= bits.size:
        raise WeightSyncError(f"{name}: a change of element {places[-1]} in a tensor of {bits.size} elements")
    bits[places] = np.frombuffer(change.payload, bits.dtype, offset=change.count * change.gap_bytes)


def bits_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as integers [n] of the same element size."""
    return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])


BASE_EVERY, BASES_KEPT = 20, 2
MANIFEST, DATA = "manifest.json", "data"


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """The size of a published version."""

    number: int
    base: bool
    nbytes: int
    changed: int
    """Number of changed elements."""
    elements: int
    """Number of all elements."""


class VersionReader:
    """Reads the weights of the newest version under ``root`` into :attr:`tensors` (CPU)."""

    def __init__(self, root: str | Path) -> None:
        self.storage = open_storage(root)
        self.tensors: dict[str, Tensor] = {}
        self.number, self.version, self.chain = 0, "", ""
        """Number (0: none), name, and manifest hash of the version that was read."""

    def update(self) -> list[str]:
        """Read up to the newest version. Return the names of the changed tensors.

        Raises WeightSyncError if a version is missing, damaged or from another writer. The next update then starts
        from a base.
        """
        names = version_names(self.storage)
        if not names:
            raise WeightSyncError(f"{self.storage.root} contains no version: publish one first")
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
            raise WeightSyncError(f"{self.storage.root} has no base for {names[-1]}: publish to an empty store")
        return names[bases[-1] :]

    def _read(self, name: str) -> set[str]:
        """Apply one version. Return the names of the changed tensors."""
        path, base = self.storage.path(name), name.endswith("-base")
        text = self.storage.read(self.storage.path(name, MANIFEST))
        try:
            manifest: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise WeightSyncError(
                f"{path}/{MANIFEST} is damaged ({error}): remove {path} and all later versions"
            ) from error
        if not base and (manifest["previous"], manifest["number"]) != (self.chain, self.number + 1):
            raise WeightSyncError(
                f"{path} does not follow version {self.number}: another writer published it; use one writer per store"
            )
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
        """Apply the change of one tensor. Return whether it changed."""
        key = entry["name"]
        change = TensorChange(entry["count"], entry["gap_bytes"], _exactly(file, entry["nbytes"]))
        if change.count == 0:
            return False
        if key not in tensors or change.count < 0:
            tensors[key] = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        apply_change(change, tensors[key], f"{path}: {key}")
        if (actual_hash := hash_of(tensors[key])) != entry["hash"]:
            raise WeightSyncError(
                f"{path}: {key} is damaged (hash {actual_hash[:12]}…, published {entry['hash'][:12]}…): remove this "
                "version and all later ones, and publish again"
            )
        return True


class VersionWriter:
    """Publishes versions under ``root``, and continues after the newest one there.

    The last version stays in memory. Every ``base_every`` versions is a base. Versions before the last
    :data:`BASES_KEPT` bases are removed.
    """

    def __init__(self, root: str | Path, base_every: int = BASE_EVERY) -> None:
        self.storage, self.base_every = open_storage(root), base_every
        self._remove_unfinished()
        self._last = VersionReader(root)
        if version_names(self.storage):
            self._last.update()

    def publish(self, version: str, tensors: Iterable[tuple[str, Tensor]]) -> PublishedVersion:
        """Publish ``tensors`` as ``version``. Readers see the previous version until this returns."""
        last = self._last
        number = last.number + 1
        names = version_names(self.storage)
        if names and number_of(names[-1]) >= number:
            raise WeightSyncError(
                f"{self.storage.root}: another writer published {names[-1]}; use one writer per store"
            )
        since = next(
            (distance for distance, name in enumerate(reversed(names)) if name.endswith("-base")), self.base_every
        )
        base = since + 1 >= self.base_every or not last.number
        name = f"{number:08d}-{'base' if base else 'delta'}"
        self.storage.remove(self.storage.path(name))  # left by a failed attempt
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
        return PublishedVersion(number, base, sum(entry["nbytes"] for entry in entries) + len(text), changed, elements)

    def _remove_unfinished(self) -> None:
        finished = set(version_names(self.storage))
        for name in self.storage.names(self.storage.root):
            if name.endswith(("-base", "-delta")) and name not in finished:
                self.storage.remove(self.storage.path(name))

    def _remove_old(self) -> None:
        names = version_names(self.storage)
        bases = [place for place, name in enumerate(names) if name.endswith("-base")]
        for name in names[: bases[-BASES_KEPT]] if len(bases) > BASES_KEPT else ():
            self.storage.remove(self.storage.path(name, MANIFEST))  # first, so that no reader sees a part
            self.storage.remove(self.storage.path(name))


def version_names(storage: Storage) -> list[str]:
    """List the names of the complete versions, oldest first."""
    found = [name for name in storage.names(storage.root) if name.endswith(("-base", "-delta"))]
    return [name for name in sorted(found) if storage.exists(storage.path(name, MANIFEST))]


def number_of(name: str) -> int:
    """Return the number of a version from its name."""
    return int(name.partition("-")[0])


def hash_of(tensor: Tensor) -> str:
    """Return the hash of the bytes of a tensor [any shape]."""
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
    """Read ``nbytes``, or up to the end. An unbuffered file may return fewer bytes before its end."""
    parts = []
    while nbytes and (part := file.read(nbytes)):
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)

    def work() -> int:
        try:
            return int(options.work(options))
        except BridgeError as error:
            raise LaunchError(str(error)) from error
        except OSError as error:
            reason = f"{error.filename or options.store}: {error.strerror or error}"
            raise LaunchError(f"{reason}: fix that, and run the command again") from error

    return run_command(work)


def _parser() -> argparse.ArgumentParser:
    about, *rest = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser("skyrl-megatron weight-versions", description=about, epilog=rest[-1])
    commands = parser.add_subparsers(required=True, metavar="publish|fetch")
    publish = commands.add_parser("publish", help="publish a folder's weights as the next version")
    publish.add_argument("folder", type=Path)
    publish.add_argument("store")
    publish.add_argument("--name", default=None, help="name of the version (default: the folder's name)")
    publish.add_argument("--base-every", type=int, default=BASE_EVERY, help="publish all tensors every N versions")
    publish.set_defaults(work=_publish)
    fetch = commands.add_parser("fetch", help="write the newest version to a folder")
    fetch.add_argument("store")
    fetch.add_argument("folder", type=Path)
    fetch.add_argument("--like", type=Path, required=True, help="folder with the model's config and tokenizer")
    fetch.set_defaults(work=_fetch)
    return parser


def _publish(options: argparse.Namespace) -> int:
    folder = HfFolder(options.folder)
    if options.base_every < 1:
        raise LaunchError(f"--base-every {options.base_every}: give 1 or more")
    writer = VersionWriter(options.store, options.base_every)
    done = writer.publish(options.name or options.folder.name, ((name, folder.read(name)) for name in folder.tensors))
    kind = "a base" if done.base else f"{done.changed} of {done.elements} elements"
    print(f"version {done.number}: {kind}, {done.nbytes / 1e6:.1f} MB")
    return 0


def _fetch(options: argparse.Namespace) -> int:
    like = HfFolder(options.like)
    reader = VersionReader(options.store)
    reader.update()
    with staged(options.folder, sum(tensor.nbytes for tensor in reader.tensors.values())) as folder:
        copy_assets(like.path, folder, like.config)
        tensors = {name: (tuple(t.shape), t.dtype) for name, t in reader.tensors.items()}
        writer = HfWriter(folder, tensors, form=like.form)
        for name, tensor in reader.tensors.items():
            writer.write(name, tensor)
        writer.finish()
    print(f"{options.folder}: version {reader.number}, {reader.version}, {len(reader.tensors)} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
