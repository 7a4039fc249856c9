"""Reading blocks of global tensors out of a role's folder, at any layout.

A block that is wanted meets one or more stored chunks. Chunks are read in the order in which they lie in their files;
each is verified, then copied to where it belongs. Nothing is unpickled but ``.metadata``, through its allow-list.
"""

from __future__ import annotations

import io
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from bridges.archive import frame
from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint.boxes import Index, overlap, slices
from skyrl_megatron.runtime.checkpoint.host_memory import HostBuffer
from skyrl_megatron.runtime.checkpoint.local_state import Block
from skyrl_megatron.runtime.checkpoint.manifest import COMMON_STATE, Manifest, read_verified
from skyrl_megatron.runtime.checkpoint.storage import Storage
from skyrl_megatron.runtime.checkpoint.unpickle import read_common_state, read_metadata
from skyrl_megatron.runtime.checkpoint.verified_file import VerifiedFile


@dataclass(frozen=True, slots=True)
class _Chunk:
    offsets: Index
    sizes: Index
    file: str
    start: int
    length: int


@dataclass(slots=True)
class _Stored:
    """A stored tensor. Chunks are found by their first axis, along which layers lie, then by comparing bounds."""

    shape: Index
    dtype: torch.dtype
    chunks: list[_Chunk]
    _lows: np.ndarray = field(init=False)
    _highs: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.chunks.sort(key=lambda chunk: chunk.offsets)
        axes = len(self.shape)
        self._lows = np.array([chunk.offsets for chunk in self.chunks], dtype=np.int64).reshape(-1, axes)
        sizes = np.array([chunk.sizes for chunk in self.chunks], dtype=np.int64).reshape(-1, axes)
        self._highs = self._lows + sizes

    def meeting(self, offsets: Index, sizes: Index) -> list[_Chunk]:
        """The chunks that have elements in common with a block."""
        first, last = 0, len(self.chunks)
        if offsets and last:  # chunks are sorted along the first axis
            longest = int((self._highs[:, 0] - self._lows[:, 0]).max())
            first = int(np.searchsorted(self._lows[:, 0], offsets[0] - longest + 1, side="left"))
            last = int(np.searchsorted(self._lows[:, 0], offsets[0] + sizes[0], side="left"))
        highs, lows = self._highs[first:last], self._lows[first:last]
        low, high = np.array(offsets, dtype=np.int64), np.array(offsets, dtype=np.int64) + np.array(sizes, np.int64)
        hits = np.flatnonzero(((lows < high) & (highs > low)).all(axis=1))
        return [self.chunks[first + int(hit)] for hit in hits]


class RoleReader:
    """The tensors of one role (``policy``, ``critic``) of a checkpoint. Raises CheckpointError when its metadata is
    damaged, asks for anything but metadata classes, or points outside of the checkpoint's files."""

    def __init__(self, storage: Storage, folder: str, manifest: Manifest, role: str) -> None:
        if role not in manifest.layouts:
            raise CheckpointError(f"{folder} holds {', '.join(manifest.roles())}, not {role}")
        self._storage, self._manifest, self._role = storage, manifest, role
        self._folder = f"{folder}/{role}"
        self._root = folder
        self._buffer = HostBuffer()
        path = f"{self._folder}/.metadata"
        metadata = read_metadata(read_verified(storage, folder, manifest, f"{role}/.metadata"), path)
        self._places = metadata.storage_data
        self.tensors: dict[str, _Stored] = {}
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                chunks = [self._chunk(key, tuple(c.offsets), tuple(c.sizes)) for c in stored.chunks]
                self.tensors[key] = _Stored(tuple(stored.size), stored.properties.dtype, chunks)

    def _chunk(self, key: str, offsets: Index, sizes: Index) -> _Chunk:
        place = self._places.get(MetadataIndex(key, offsets))
        entry = self._manifest.files.get(f"{self._role}/{place.relative_path}") if place else None
        if entry is None or not 0 <= place.offset <= place.offset + place.length <= entry.bytes:
            raise CheckpointError(f"{self._folder}/.metadata does not say where {key} at {offsets} is: refused")
        return _Chunk(offsets, sizes, str(place.relative_path), place.offset, place.length)

    def common_state(self) -> dict:
        """Megatron's ``common_state``: plain values, read through an allow-list after the hash was checked."""
        place = self._places.get(MetadataIndex(COMMON_STATE))
        name = f"{self._role}/{place.relative_path}" if place else ""
        if name not in self._manifest.files:
            raise CheckpointError(f"{self._folder} has no common_state: refused")
        start, stop = place.offset, place.offset + place.length
        if not 0 <= start <= stop <= self._manifest.files[name].bytes:
            raise CheckpointError(f"{self._folder}/.metadata points beyond the end of {name}: refused")
        file = self._open(str(place.relative_path), [(start, stop)])
        try:
            return read_common_state(bytes(file.read(start, stop)), self._folder)
        finally:
            file.close()

    def load(self, blocks: Iterable[Block]) -> None:
        """Fill ``data`` of every block. Raises CheckpointError when a tensor is missing, has another shape, or the
        chunks do not cover a block; memory of some blocks may have been overwritten by then."""
        wanted: dict[str, dict[_Chunk, list[tuple[Block, Index, Index]]]] = defaultdict(lambda: defaultdict(list))
        for block in blocks:
            stored = self._stored(block)
            resized = stored.shape != block.global_shape
            if resized:
                block.data.zero_()
            covered = 0
            for chunk in stored.meeting(block.offsets, block.sizes):
                common = overlap(chunk.offsets, chunk.sizes, block.offsets, block.sizes)
                assert common is not None
                covered += int(np.prod(common[1], dtype=np.int64))
                wanted[chunk.file][chunk].append((block, *common))
            if covered != block.data.numel() and not (resized and covered < block.data.numel()):
                raise CheckpointError(f"{self._folder}: {block.key} is stored incompletely at {block.offsets}")
        for name in sorted(wanted):
            chunks = sorted(wanted[name], key=lambda chunk: chunk.start)
            file = self._open(name, [(chunk.start, chunk.start + chunk.length) for chunk in chunks])
            try:
                for chunk in chunks:
                    self._copy(file, chunk, wanted[name][chunk])
            finally:
                file.close()
        self._buffer.release()

    def _stored(self, block: Block) -> _Stored:
        stored = self.tensors.get(block.key)
        if stored is None:
            raise CheckpointError(f"{self._folder} has no tensor {block.key}; it was saved from another model")
        if stored.shape != block.global_shape and not (block.flexible and len(stored.shape) == len(block.offsets)):
            raise CheckpointError(
                f"{self._folder}: {block.key} has shape {stored.shape}, the model's is {block.global_shape}"
            )
        return stored

    def _open(self, name: str, ranges: list[tuple[int, int]]) -> VerifiedFile:
        path = f"{self._folder}/{name}"
        self._storage.refuse_escape(self._root, path)
        try:
            return VerifiedFile(
                self._storage, path, self._manifest.files[f"{self._role}/{name}"], self._buffer, ranges
            )
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error

    def _copy(self, file: VerifiedFile, chunk: _Chunk, targets: list[tuple[Block, Index, Index]]) -> None:
        archive = file.read(chunk.start, chunk.start + chunk.length)
        dtype = self.tensors[targets[0][0].key].dtype
        source = _tensor(archive, chunk, dtype, self._folder)
        for block, offsets, sizes in targets:
            target = block.data.view(block.sizes)[slices(offsets, sizes, block.offsets)]
            target.copy_(source[slices(offsets, sizes, chunk.offsets)])


def _tensor(archive: memoryview, chunk: _Chunk, dtype: torch.dtype, folder: str) -> torch.Tensor:
    """The tensor in a ``torch.save`` archive, without unpickling: its data lies there as it was in memory."""
    count = int(np.prod(chunk.sizes, dtype=np.int64)) * dtype.itemsize
    before, after = frame(chunk.sizes, dtype)
    begin = len(before)
    if archive[:begin] != before or len(archive) != begin + count + len(after):
        begin = _data_start(archive, count, f"{folder}/{chunk.file} at byte {chunk.start}")
    data = archive[begin : begin + count]
    if (chunk.start + begin) % dtype.itemsize:
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=dtype).view(chunk.sizes) if count else torch.empty(chunk.sizes, dtype=dtype)


def _data_start(archive: memoryview, count: int, place: str) -> int:
    """Where the data begins in an archive that another version of torch made."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as found:
            info = next(each for each in found.infolist() if each.filename.endswith("/data/0"))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise CheckpointError(f"{place}: not an archive of a tensor ({error})") from error
    header = info.header_offset
    names = int.from_bytes(archive[header + 26 : header + 28], "little")
    extra = int.from_bytes(archive[header + 28 : header + 30], "little")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != count:
        raise CheckpointError(f"{place}: {info.file_size} bytes of data instead of {count}")
    return header + 30 + names + extra
