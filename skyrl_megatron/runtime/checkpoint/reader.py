"""Reading blocks of global tensors out of a role's folder, at any layout.

A block that is wanted meets one or more stored chunks. Chunks are read in the order in which they lie in their files;
each is verified, then copied to where it belongs. Nothing is unpickled but ``.metadata`` and ``common_state``, through
their allow-lists.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from bridges.errors import BridgeError
from bridges.metadata import parse_common_state, parse_metadata
from bridges.rows import Shape
from bridges.torch_dist import Chunk, StoredTensor, common_state_chunk, overlap, slices, stored_tensors, tensor_in
from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint.host_memory import HostBuffer
from skyrl_megatron.runtime.checkpoint.local_state import Block
from skyrl_megatron.runtime.checkpoint.manifest import Manifest, read_verified
from skyrl_megatron.runtime.checkpoint.storage import Storage
from skyrl_megatron.runtime.checkpoint.verified_file import VerifiedFile


@contextmanager
def _format_errors() -> Iterator[None]:
    """Raise what the format's own code refuses as CheckpointError."""
    try:
        yield
    except BridgeError as error:
        raise CheckpointError(str(error)) from error


class RoleReader:
    """The tensors of one role (``policy``, ``critic``) of a checkpoint. Raises CheckpointError when its metadata is
    damaged, asks for anything but metadata classes, or points outside of the checkpoint's files."""

    @_format_errors()
    def __init__(self, storage: Storage, folder: str, manifest: Manifest, role: str) -> None:
        if role not in manifest.layouts:
            named = any("/" in each for each in (role, *manifest.roles()))
            fix = "; trainer.policy.model.lora.adapters says which adapters a run has" if named else ""
            raise CheckpointError(f"{folder} holds {', '.join(manifest.roles())}, not {role}{fix}")
        self._storage, self._manifest, self._role = storage, manifest, role
        self._folder = f"{folder}/{role}"
        self._root = folder
        self._buffer = HostBuffer()
        content = read_verified(storage, folder, manifest, f"{role}/.metadata")
        self._metadata = parse_metadata(content, f"{self._folder}/.metadata")
        self.tensors: dict[str, StoredTensor] = stored_tensors(self._metadata, self._folder, self._file_bytes)

    def _file_bytes(self, name: str, key: str) -> int | None:
        entry = self._manifest.files.get(f"{self._role}/{name}")
        return entry.bytes if entry else None

    @_format_errors()
    def common_state(self) -> dict[str, Any]:
        """Return Megatron's ``common_state``: plain values, read through an allow-list after the hash was checked."""
        place = common_state_chunk(self._metadata, self._folder)
        file = self._open(place.file, [place])
        try:
            return parse_common_state(bytes(file.read(place.start, place.start + place.length)), self._folder)
        finally:
            file.close()

    @_format_errors()
    def load(self, blocks: Iterable[Block]) -> None:
        """Fill ``data`` of every block. Raises CheckpointError when a tensor is missing, has another shape, or the
        chunks do not cover a block; memory of some blocks may have been overwritten by then."""
        wanted: dict[str, dict[Chunk, list[tuple[Block, Shape, Shape]]]] = defaultdict(lambda: defaultdict(list))
        for block in blocks:
            stored = self._stored(block)
            resized = stored.shape != block.global_shape
            if resized:
                block.data.zero_()
            covered = 0
            for chunk in stored.meeting(block.offsets, block.sizes):
                shared = overlap(chunk.offsets, chunk.sizes, block.offsets, block.sizes)
                assert shared is not None
                covered += math.prod(shared[1])
                wanted[chunk.file][chunk].append((block, *shared))
            if covered != block.data.numel() and not (resized and covered < block.data.numel()):
                raise CheckpointError(f"{self._folder}: {block.key} is stored incompletely at {block.offsets}")
        for name in sorted(wanted):
            chunks = sorted(wanted[name], key=lambda chunk: chunk.start)
            file = self._open(name, chunks)
            try:
                for chunk in chunks:
                    self._copy(file, chunk, wanted[name][chunk])
            finally:
                file.close()
        self._buffer.release()

    def _stored(self, block: Block) -> StoredTensor:
        stored = self.tensors.get(block.key)
        if stored is None:
            raise CheckpointError(f"{self._folder} has no tensor {block.key}; it was saved from another model")
        if stored.shape != block.global_shape and not (block.flexible and len(stored.shape) == len(block.offsets)):
            raise CheckpointError(
                f"{self._folder}: {block.key} has shape {stored.shape}, the model's is {block.global_shape}"
            )
        return stored

    def _open(self, name: str, chunks: list[Chunk]) -> VerifiedFile:
        path = f"{self._folder}/{name}"
        self._storage.refuse_escape(self._root, path)
        entry = self._manifest.files[f"{self._role}/{name}"]
        ranges = [(chunk.start, chunk.start + chunk.length) for chunk in chunks]
        try:
            return VerifiedFile(self._storage, path, entry, self._buffer, ranges)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error

    def _copy(self, file: VerifiedFile, chunk: Chunk, targets: list[tuple[Block, Shape, Shape]]) -> None:
        archive = file.read(chunk.start, chunk.start + chunk.length)
        source = tensor_in(archive, chunk, self.tensors[targets[0][0].key].dtype, self._folder)
        for block, offsets, sizes in targets:
            target = block.data.view(block.sizes)[slices(offsets, sizes, block.offsets)]
            target.copy_(source[slices(offsets, sizes, chunk.offsets)])
