"""Read and write ``torch_dist`` checkpoints chunk by chunk, without a model, process groups or Megatron.

The format is that of ``torch.distributed.checkpoint`` with the keys and shapes of Megatron's ``sharded_state_dict()``
and two additions of ``megatron/core/dist_checkpointing/serialization.py``: ``metadata.json`` and the object
``common_state``. A checkpoint has ``.metadata`` (file and offset of each chunk of each tensor), ``__*.distcp`` (the
chunks, concatenated) and ``metadata.json``.

Each chunk is a ``torch.save`` archive (an uncompressed zip). The bytes around the data depend on shape and dtype only,
so they are created once per kind of chunk with ``torch.serialization.skip_data``, and the data is never copied into a
buffer. Chunks written here are whole layers and experts, with gate and up separate, so that every tp/pp/vpp/ep/etp can
be loaded by reading parts of them.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

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

from bridges.errors import BridgeError
from bridges.files import open_regular, refuse_outside
from bridges.hf_io import DTYPES, map_file
from bridges.metadata import Call, load, parse_metadata, zipped
from bridges.rows import Shape
from bridges.staging import FileWriter, write_file

_CHECKSUMS = threading.Lock()  # torch's option for zip checksums is global to the process


class _FrameRecorder(io.RawIOBase):
    """A file that records the bytes before and after the data; ``torch.save`` skips the data by a relative seek."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.after = bytearray()
        self.hole: int | None = None

    def write(self, data: object) -> int:
        content = bytes(data)  # type: ignore[call-overload]
        (self.before if self.hole is None else self.after).extend(content)
        return len(content)

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == 1 and self.hole is None, "torch.save leaves one hole per tensor"
        self.hole = offset
        return self.tell()

    def tell(self) -> int:
        return len(self.before) + (self.hole or 0) + len(self.after)


@lru_cache(maxsize=256)
def frame(shape: Shape, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Return the bytes before and after the data in ``torch.save`` of a contiguous tensor.

    They have no zip checksums (``torch.serialization.set_crc32_options(False)``), which ``torch.load`` does not read.
    """
    file = _FrameRecorder()
    with _CHECKSUMS, torch.serialization.skip_data():
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], file))
        finally:
            torch.serialization.set_crc32_options(before)
    return bytes(file.before), bytes(file.after)


_STORAGES = (
    "DoubleStorage", "FloatStorage", "HalfStorage", "BFloat16Storage", "LongStorage", "IntStorage", "ShortStorage",
    "CharStorage", "ByteStorage", "BoolStorage",
)  # fmt: skip
_NAMES: dict[tuple[str, str], Any] = {
    **{("torch._utils", name): Call(lambda storage, offset, size, stride, *rest: (offset, size, stride))
       for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")},
    ("torch._utils", "_rebuild_parameter"): Call(lambda data, *rest: data),
    ("collections", "OrderedDict"): Call(lambda *rest: None),  # no hooks
    ("torch.storage", "UntypedStorage"): None,
    **{("torch", name): None for name in _STORAGES},
    **{("torch", str(dtype).removeprefix("torch.")): None for dtype in DTYPES.values()},
}  # fmt: skip
"""Names in the pickle of a tensor. They give (offset, size, stride) of the data without creating a tensor."""


def parse_archive(archive: memoryview, shape: Shape, dtype: torch.dtype) -> tuple[int, tuple[int, Shape, Shape]]:
    """Parse a ``torch.save`` archive of another torch version: (start of the data, (offset, size, stride)).

    The layout is in elements. Raises ValueError if it is not an archive of a tensor of this shape.
    """
    try:
        info, pickled = zipped(archive, "/data/0")
        layout = load(pickled, _NAMES, persistent=True)
    except ValueError as error:
        raise ValueError(f"not an archive of a tensor ({error})") from error
    header, count = info.header_offset, math.prod(shape) * dtype.itemsize
    names = int.from_bytes(archive[header + 26 : header + 28], "little")
    extra = int.from_bytes(archive[header + 28 : header + 30], "little")
    begin = header + 30 + names + extra
    if info.file_size != count or not 0 <= begin <= len(archive) - count:
        raise ValueError(f"{info.file_size} bytes of data instead of {count}")
    if not _is_layout(layout, shape, math.prod(shape)):
        raise ValueError(f"not an archive of a tensor of shape {shape}")
    return begin, layout


def _is_layout(layout: Any, shape: Shape, count: int) -> bool:
    """Return whether an unpickled value is a valid (offset, size, stride) within ``count`` elements."""
    if not isinstance(layout, tuple) or len(layout) != 3 or layout[1] != shape or not isinstance(layout[2], tuple):
        return False
    offset, _, stride = layout
    if len(stride) != len(shape) or any(type(each) is not int or each < 0 for each in (offset, *stride)):
        return False
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return not count or last < count


FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
"""The content of ``metadata.json``."""
COMMON_STATE = "common_state/shard_0_1"
"""Key of the object for state that is not a tensor."""
ALIGNMENT = 64  # archives start at multiples of this, so that tensors can be views of a mapped file


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored block of a tensor: its offsets and sizes, and its archive ``[start, start + length)`` in ``file``.

    Objects have offsets ().
    """

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a checkpoint. Chunks are searched by the first axis (the layer axis), then by their bounds."""

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
        """Return the chunks that overlap with a block."""
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
    """Return offsets and sizes of the intersection of two blocks of a tensor, None if it is empty."""
    begin = tuple(max(a, b) for a, b in zip(a_offsets, b_offsets, strict=True))
    ends = zip(a_offsets, a_sizes, b_offsets, b_sizes, strict=True)
    sizes = tuple(min(a + n, b + m) - c for (a, n, b, m), c in zip(ends, begin, strict=True))
    return (begin, sizes) if all(size > 0 for size in sizes) else None


def slices(offsets: Shape, sizes: Shape, origin: Shape) -> tuple[slice, ...]:
    """Return a block as an index into a tensor whose first element is at ``origin``."""
    return tuple(slice(o - b, o - b + n) for o, n, b in zip(offsets, sizes, origin, strict=True))


# ------------------------------------------------------------------------------------------ reading
def stored_tensors(
    metadata: Metadata, where: str, file_bytes: Callable[[str, str], int | None]
) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint by its key.

    ``file_bytes``: (name of a data file, key of a tensor in it) → size of the file; None for a file that is not part
    of the checkpoint. ``where``: the folder, for messages. Raises :class:`BridgeError` if an object or a chunk is
    outside of its file, is longer than its bytes, or if chunks share bytes. Reads are therefore never larger than the
    files.
    """
    locations: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
    sizes: dict[str, int | None] = {}
    used: Counter[str] = Counter()
    for index, info in locations.items():
        file = str(info.relative_path)
        size = sizes[file] if file in sizes else sizes.setdefault(file, file_bytes(file, index.fqn))
        if size is None:
            raise BridgeError(
                f"{where}/.metadata does not say where {index.fqn} is: {file} is not a file of the checkpoint: "
                "refused; save or import the checkpoint again"
            )
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
    tensors = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            dtype = stored.properties.dtype
            chunks = [_chunk(locations, key, tuple(c.offsets), tuple(c.sizes), where) for c in stored.chunks]
            for chunk in chunks:
                if (count := math.prod(chunk.sizes) * dtype.itemsize) > chunk.length:
                    raise BridgeError(
                        f"{where}/.metadata gives {key} at {chunk.offsets} {chunk.length} bytes of {chunk.file}, but "
                        f"a block of {list(chunk.sizes)} has {count}: refused; save or import the checkpoint again"
                    )
            tensors[key] = StoredTensor(tuple(stored.size), dtype, chunks)
    return tensors


def common_state_chunk(metadata: Metadata, where: str) -> Chunk:
    """Return the location of the object ``common_state``. Raises :class:`BridgeError` if there is none."""
    locations: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
    info = locations.get(MetadataIndex(COMMON_STATE))
    if info is None:
        raise BridgeError(f"{where} has no common_state: refused; save or import the checkpoint again")
    return Chunk((), (), str(info.relative_path), info.offset, info.length)


def _chunk(
    locations: Mapping[MetadataIndex, _StorageInfo], key: str, offsets: Shape, sizes: Shape, where: str
) -> Chunk:
    info = locations.get(MetadataIndex(key, offsets))
    if info is None:
        raise BridgeError(
            f"{where}/.metadata does not say where {key} at {offsets} is; save or import the checkpoint again"
        )
    return Chunk(offsets, sizes, str(info.relative_path), info.offset, info.length)


def tensor_in(archive: memoryview, chunk: Chunk, dtype: torch.dtype, where: str) -> Tensor:
    """Return the tensor [``chunk.sizes``] in its archive: a view, or a copy if the data is not aligned.

    No code of the archive runs; its data is the raw memory of the tensor. Raises :class:`BridgeError` if damaged.
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
    """One ``.distcp`` file, written sequentially by one thread, without intermediate copies of the data."""

    def __init__(self, name: str, file: FileWriter) -> None:
        self.name = name
        self.written: list[tuple[str, Chunk]] = []
        """(key, location) of everything written."""
        self._file = file
        self._end = 0

    def append(self, key: str, offsets: Shape, sizes: Shape, dtype: torch.dtype, data: Iterable[memoryview]) -> None:
        """Append a block of ``sizes``; ``data``: its bytes in row-major order, in any number of parts."""
        before, after = frame(sizes, dtype)
        start = self._write_aligned(before)
        for part in data:
            self._write(part)
        self._write(after)
        self.written.append((key, Chunk(offsets, sizes, self.name, start, self._end - start)))

    def append_object(self, key: str, value: object) -> None:
        """Append an object as Megatron stores it: ``torch.save([value])``."""
        buffer = io.BytesIO()
        torch.save([value], buffer)
        start = self._write_aligned(buffer.getbuffer())
        self.written.append((key, Chunk((), (), self.name, start, self._end - start)))

    def _write_aligned(self, part: memoryview | bytes) -> int:
        """Write at the next multiple of :data:`ALIGNMENT`; return this offset."""
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
        """Close the file without syncing; may be called twice, and after :meth:`finish`."""
        self._file.abandon()


def build_metadata(tensors: Mapping[str, tuple[Shape, torch.dtype]], written: Iterable[tuple[str, Chunk]]) -> Metadata:
    """Return torch's metadata of a checkpoint. ``tensors``: key → (global shape, dtype).

    Raises :class:`BridgeError` unless the chunks ``written`` cover every tensor exactly once.
    """
    chunks: dict[str, list[Chunk]] = {key: [] for key in tensors}
    locations: dict[MetadataIndex, _StorageInfo] = {}
    for key, chunk in written:
        index = MetadataIndex(key) if key == COMMON_STATE else MetadataIndex(key, chunk.offsets)
        if index in locations:
            raise BridgeError(f"{key} at {chunk.offsets} was written twice: each chunk must be of one rank")
        locations[index] = _StorageInfo(chunk.file, chunk.start, chunk.length)
        if key != COMMON_STATE:
            chunks[key].append(chunk)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {COMMON_STATE: BytesStorageMetadata()}
    for key, (shape, dtype) in tensors.items():
        in_order = sorted(chunks[key], key=lambda chunk: chunk.offsets)
        covered = sum(math.prod(chunk.sizes) for chunk in in_order)
        if covered != math.prod(shape):
            raise BridgeError(
                f"{key} has {math.prod(shape)} elements, {covered} were written: every rank must write its chunks"
            )
        entries[key] = TensorStorageMetadata(
            TensorProperties(dtype=dtype),
            torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in in_order],
        )
    return Metadata(entries, storage_data=locations, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)


class DistCheckpoint:
    """A ``torch_dist`` folder opened for reading: ``tensors`` by key, data as views of memory-mapped files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._check_format()
        metadata = self.path / ".metadata"
        try:
            with open_regular(metadata) as file:
                content = file.read()
        except OSError as error:
            raise BridgeError(f"{metadata}: {error.strerror}; save or import the checkpoint again") from error
        self.tensors = stored_tensors(parse_metadata(content, str(metadata)), str(path), self._file_bytes)
        self._maps: dict[str, memoryview] = {}

    def _check_format(self) -> None:
        path = self.path / "metadata.json"
        if not path.exists():
            raise BridgeError(
                f"{self.path} has no metadata.json: not a Megatron distributed checkpoint, or one whose save was "
                "interrupted; use the folder that holds metadata.json and *.distcp files"
            )
        try:
            with open_regular(path) as file:
                stated = json.loads(file.read())
        except (OSError, ValueError, RecursionError) as error:
            raise BridgeError(f"{path} is damaged ({error}); save or import the checkpoint again") from error
        for key, expected in FORMAT.items():
            if not isinstance(stated, dict) or stated.get(key) != expected:
                got = stated.get(key) if isinstance(stated, dict) else stated
                raise BridgeError(
                    f"{path}: {key}={got!r}, only {expected!r} can be read; load the checkpoint with the Megatron "
                    "that wrote it and save it with --ckpt-format torch_dist"
                )

    def _file_bytes(self, name: str, key: str) -> int:
        """Return the size of a data file. Raises :class:`BridgeError` if it is outside of the folder or missing."""
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise BridgeError(f"{self.path}/.metadata names {name!r}, which is outside the folder; fetch it again")
        if not (self.path / name).is_file():
            raise BridgeError(f"{self.path / name} (for {key}) is missing; fetch that file again")
        refuse_outside(self.path / name, self.path)
        return (self.path / name).stat().st_size

    def read(self, key: str, offsets: Shape, shape: Shape, lead: int = 0) -> Tensor:
        """Return the block [``shape``] at ``offsets``; a view of the file if one chunk is exactly this block.

        ``lead``: number of leading axes of length 1 that are dropped from the result.
        """
        stored = self.tensors[key]
        chunks = stored.meeting(offsets, shape)
        if len(chunks) == 1 and (chunks[0].offsets, chunks[0].sizes) == (offsets, shape):
            return self._load(chunks[0], stored.dtype).reshape(shape[lead:])
        common = [(chunk, overlap(chunk.offsets, chunk.sizes, offsets, shape)) for chunk in chunks]
        if sum(math.prod(shared[1]) for _, shared in common if shared) != math.prod(shape):
            raise BridgeError(f"{self.path}: {key} is incomplete at {offsets}; save the checkpoint again")
        block = torch.empty(shape, dtype=stored.dtype)
        for chunk, shared in common:
            assert shared is not None
            block[slices(*shared, offsets)] = self._load(chunk, stored.dtype)[slices(*shared, chunk.offsets)]
        return block.reshape(shape[lead:])

    def _load(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        if chunk.file not in self._maps:
            self._maps[chunk.file] = memoryview(map_file(self.path / chunk.file))
        archive = self._maps[chunk.file][chunk.start : chunk.start + chunk.length]
        return tensor_in(archive, chunk, dtype, str(self.path))


def write_metadata(
    folder: Path, tensors: Mapping[str, tuple[Shape, torch.dtype]], files: list[ChunkFile], common: Mapping[str, Any]
) -> None:
    """Finish ``files``, then write ``common_state``, ``.metadata`` and, last, ``metadata.json``.

    ``tensors``: key → (global shape, dtype). ``files``: the open files with all chunks.
    """
    files[0].append_object(COMMON_STATE, dict(common))
    for file in files:
        file.finish()
    metadata = build_metadata(tensors, (chunk for file in files for chunk in file.written))
    write_file(folder / ".metadata", pickle.dumps(metadata))
    write_file(folder / "metadata.json", json.dumps(FORMAT).encode())
