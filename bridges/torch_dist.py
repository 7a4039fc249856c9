"""The ``torch_dist`` format: what a checkpoint's files hold and how chunks are placed in them. Opens no file.

The format is that of ``torch.distributed.checkpoint`` with the keys and shapes of Megatron's ``sharded_state_dict()``
and two additions of ``megatron/core/dist_checkpointing/serialization.py``: ``metadata.json`` and the object
``common_state``. A checkpoint is ``.metadata`` (which chunk of which tensor lies where), ``__*.distcp`` (the chunks,
one ``torch.save`` archive each, end to end) and ``metadata.json``.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from bridges.archive import frame, parse_archive
from bridges.errors import BridgeError
from bridges.rows import Shape
from bridges.staging import FileWriter

FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
"""The content of ``metadata.json``."""
COMMON_STATE = "common_state/shard_0_1"
"""Key of what is no tensor."""
ALIGNMENT = 64  # archives start at multiples, so that data can be used where it lies in a mapped file


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored block of a tensor: offsets and sizes within the whole, and its archive ``[start, start + length)`` of
    ``file``. Objects have offsets ()."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a checkpoint. Chunks are found by their first axis, along which layers lie, then by their bounds."""

    shape: Shape
    dtype: torch.dtype
    chunks: list[Chunk]
    _lows: np.ndarray = field(init=False)
    _highs: np.ndarray = field(init=False)
    _longest: int = field(init=False, default=0)  # along the first axis

    def __post_init__(self) -> None:
        self.chunks.sort(key=lambda chunk: chunk.offsets)
        axes = len(self.shape)
        self._lows = np.array([chunk.offsets for chunk in self.chunks], dtype=np.int64).reshape(-1, axes)
        sizes = np.array([chunk.sizes for chunk in self.chunks], dtype=np.int64).reshape(-1, axes)
        self._highs = self._lows + sizes
        if axes and self.chunks:
            self._longest = int(sizes[:, 0].max())

    def meeting(self, offsets: Shape, sizes: Shape) -> list[Chunk]:
        """Return the chunks that have elements in common with a block."""
        first, last = 0, len(self.chunks)
        if offsets and last:
            first = int(np.searchsorted(self._lows[:, 0], offsets[0] - self._longest + 1, side="left"))
            last = int(np.searchsorted(self._lows[:, 0], offsets[0] + sizes[0], side="left"))
        highs, lows = self._highs[first:last], self._lows[first:last]
        low = np.array(offsets, dtype=np.int64)
        high = low + np.array(sizes, dtype=np.int64)
        hits = np.flatnonzero(((lows < high) & (highs > low)).all(axis=1))
        return [self.chunks[first + int(hit)] for hit in hits]


def overlap(a_offsets: Shape, a_sizes: Shape, b_offsets: Shape, b_sizes: Shape) -> tuple[Shape, Shape] | None:
    """Return offsets and sizes of the common block of two blocks of a tensor, None when they do not meet."""
    begin = tuple(max(a, b) for a, b in zip(a_offsets, b_offsets, strict=True))
    ends = zip(a_offsets, a_sizes, b_offsets, b_sizes, strict=True)
    sizes = tuple(min(a + n, b + m) - c for (a, n, b, m), c in zip(ends, begin, strict=True))
    return (begin, sizes) if all(size > 0 for size in sizes) else None


def slices(offsets: Shape, sizes: Shape, origin: Shape) -> tuple[slice, ...]:
    """Return the block as an index into a tensor whose first element lies at ``origin``."""
    return tuple(slice(o - b, o - b + n) for o, n, b in zip(offsets, sizes, origin, strict=True))


# ------------------------------------------------------------------------------------------ reading
def stored_tensors(
    metadata: Metadata, where: str, file_bytes: Callable[[str, str], int | None]
) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint by its key.

    ``file_bytes`` gives the size of a data file by its name and that of a tensor in it, None for one that is no part
    of the checkpoint; ``where`` names the folder in messages. Raises :class:`BridgeError` when an object or a chunk
    is outside of the files, or is longer than the bytes it has there: no two chunks share bytes, so that nothing
    that is read of a checkpoint is larger than its files.
    """
    places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
    sizes: dict[str, int | None] = {}
    used: Counter[str] = Counter()
    for index, info in places.items():
        file = str(info.relative_path)
        size = sizes[file] if file in sizes else sizes.setdefault(file, file_bytes(file, index.fqn))
        if size is None:
            raise BridgeError(f"{where}/.metadata does not say where {index.fqn} is: {file} is no file of it: refused")
        if not 0 <= info.offset <= info.offset + info.length <= size:
            raise BridgeError(
                f"{where}/{file} is truncated: {index.fqn} ends at byte {info.offset + info.length}, the file has "
                f"{size}; fetch that file again"
            )
        used[file] += info.length
        if used[file] > size:
            raise BridgeError(
                f"{where}/.metadata places {used[file]} bytes of chunks in {file}, which has {size}: refused; save or "
                "import the checkpoint again"
            )
    found = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            dtype = stored.properties.dtype
            chunks = [_chunk(places, key, tuple(c.offsets), tuple(c.sizes), where) for c in stored.chunks]
            for chunk in chunks:
                if (count := math.prod(chunk.sizes) * dtype.itemsize) > chunk.length:
                    raise BridgeError(
                        f"{where}/.metadata gives {key} at {chunk.offsets} {chunk.length} bytes of {chunk.file}, and "
                        f"{list(chunk.sizes)} numbers of it have {count}: refused; save or import the checkpoint again"
                    )
            found[key] = StoredTensor(tuple(stored.size), dtype, chunks)
    return found


def common_state_chunk(metadata: Metadata, where: str) -> Chunk:
    """Return where the object ``common_state`` lies. Raises :class:`BridgeError` when there is none."""
    places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
    info = places.get(MetadataIndex(COMMON_STATE))
    if info is None:
        raise BridgeError(f"{where} has no common_state: refused")
    return Chunk((), (), str(info.relative_path), info.offset, info.length)


def _chunk(places: Mapping[MetadataIndex, _StorageInfo], key: str, offsets: Shape, sizes: Shape, where: str) -> Chunk:
    info = places.get(MetadataIndex(key, offsets))
    if info is None:
        raise BridgeError(
            f"{where}/.metadata does not say where {key} at {offsets} is; save or import the checkpoint again"
        )
    return Chunk(offsets, sizes, str(info.relative_path), info.offset, info.length)


def tensor_in(archive: memoryview, chunk: Chunk, dtype: torch.dtype, where: str) -> Tensor:
    """Return the tensor of shape ``chunk.sizes`` in its archive: a view, or a copy where the data is not aligned.

    No code of it is run: the data lies there as it was in memory. Raises :class:`BridgeError` when it does not.
    """
    count = math.prod(chunk.sizes) * dtype.itemsize
    before, after = frame(chunk.sizes, dtype)
    begin, layout = len(before), None
    if archive[:begin] != before or len(archive) != begin + count + len(after):
        try:
            begin, layout = parse_archive(archive, chunk.sizes, dtype)  # another version of torch wrote it
        except ValueError as error:
            raise BridgeError(
                f"{where}/{chunk.file} is damaged at byte {chunk.start}: {error}; fetch that file again"
            ) from error
    if not count:
        return torch.empty(chunk.sizes, dtype=dtype)
    data = archive[begin : begin + count]
    if (chunk.start + begin) % dtype.itemsize:
        data = memoryview(bytearray(data))
    flat = torch.frombuffer(data, dtype=dtype)
    if layout is not None:
        offset, size, stride = layout
        return flat.as_strided(size, stride, offset)
    return flat.view(chunk.sizes)


# ------------------------------------------------------------------------------------------ writing
class ChunkFile:
    """One ``.distcp`` file, filled from front to back by one thread. The bytes around a tensor's data depend on shape
    and dtype only, so data goes from where it lies straight into ``file``."""

    def __init__(self, name: str, file: FileWriter) -> None:
        self.name = name
        self.written: list[tuple[str, Chunk]] = []
        """(key, place) of everything written."""
        self._file = file
        self._end = 0

    def append(self, key: str, offsets: Shape, sizes: Shape, dtype: torch.dtype, data: Iterable[memoryview]) -> None:
        """Append a block of ``sizes``; ``data``: its bytes in row-major order, in as many parts as is convenient."""
        before, after = frame(sizes, dtype)
        start = self._write_aligned(before)
        for part in data:
            self._write(part)
        self._write(after)
        self.written.append((key, Chunk(offsets, sizes, self.name, start, self._end - start)))

    def append_object(self, key: str, value: object) -> None:
        """Append an object, as Megatron stores what is not a tensor: ``torch.save([value])``."""
        buffer = io.BytesIO()
        torch.save([value], buffer)
        start = self._write_aligned(buffer.getbuffer())
        self.written.append((key, Chunk((), (), self.name, start, self._end - start)))

    def _write_aligned(self, part: memoryview | bytes) -> int:
        """Write from the next multiple of :data:`ALIGNMENT` on; returns that."""
        padding = bytes(-self._end % ALIGNMENT)
        self._file.write(padding, part)
        start = self._end + len(padding)
        self._end = start + len(part)
        return start

    def _write(self, part: memoryview | bytes) -> None:
        self._file.write(part)
        self._end += len(part)

    def finish(self) -> None:
        """Make the file durable and close it."""
        self._file.finish()

    def abandon(self) -> None:
        """Close the file as it is; safe to call twice, and after :meth:`finish`."""
        self._file.abandon()


def build_metadata(tensors: Mapping[str, tuple[Shape, torch.dtype]], written: Iterable[tuple[str, Chunk]]) -> Metadata:
    """Return torch's metadata of a checkpoint. ``tensors``: key → (global shape, dtype).

    Raises :class:`BridgeError` unless the chunks ``written`` make up every tensor exactly once.
    """
    chunks: dict[str, list[Chunk]] = {key: [] for key in tensors}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, chunk in written:
        index = MetadataIndex(key) if key == COMMON_STATE else MetadataIndex(key, chunk.offsets)
        if index in places:
            raise BridgeError(f"{key} at {chunk.offsets} was written twice")
        places[index] = _StorageInfo(chunk.file, chunk.start, chunk.length)
        if key != COMMON_STATE:
            chunks[key].append(chunk)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {COMMON_STATE: BytesStorageMetadata()}
    for key, (shape, dtype) in tensors.items():
        pieces = sorted(chunks[key], key=lambda chunk: chunk.offsets)
        covered = sum(math.prod(piece.sizes) for piece in pieces)
        if covered != math.prod(shape):
            raise BridgeError(f"{key} has {math.prod(shape)} elements, {covered} were written")
        entries[key] = TensorStorageMetadata(
            TensorProperties(dtype=dtype),
            torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in pieces],
        )
    return Metadata(entries, storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
