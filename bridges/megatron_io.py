"""Distributed checkpoints of Megatron (``torch_dist``), read and written chunk by chunk.

No model is built, no process group exists and Megatron is not imported: the format is that of
``torch.distributed.checkpoint``, with the keys and shapes of Megatron's ``sharded_state_dict()`` and two additions of
``megatron/core/dist_checkpointing/serialization.py``: ``metadata.json`` and the object ``common_state``.

A checkpoint is ``.metadata`` (which chunk of which tensor lies where), ``__*.distcp`` (the chunks, one ``torch.save``
archive each, end to end) and ``metadata.json``, written last. Chunks are whole layers and experts, gate and up apart,
so that any tp/pp/vpp/ep/etp can be loaded by reading parts of them.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import mmap
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

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

from bridges.archive import frame
from bridges.errors import BridgeError
from bridges.hf_io import map_file, view_of
from bridges.metadata import read_metadata
from bridges.rows import Shape
from bridges.staging import byte_blocks, write_all, write_file

FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
ALIGNMENT = 64  # of chunks in a file, so that their data can be used where it lies
COMMON_STATE = "common_state/shard_0_1"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored piece of a tensor: offsets and shape within the whole, and its archive ``[start, start + length)``."""

    offsets: Shape
    shape: Shape
    file: str
    start: int
    length: int


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a checkpoint: global shape, dtype, and its chunks by the index of their leading axes."""

    shape: Shape
    dtype: torch.dtype
    chunks: list[Chunk]
    _by_lead: dict[int, dict[Shape, list[Chunk]]] = field(default_factory=dict)

    def overlapping(self, offsets: Shape, lead: int) -> list[Chunk]:
        """Chunks that hold the index ``offsets[:lead]`` on the first ``lead`` axes."""
        if lead not in self._by_lead:
            index: dict[Shape, list[Chunk]] = {}
            for chunk in self.chunks:
                spans = (range(chunk.offsets[i], chunk.offsets[i] + chunk.shape[i]) for i in range(lead))
                for place in itertools.product(*spans):
                    index.setdefault(place, []).append(chunk)
            self._by_lead[lead] = index
        return self._by_lead[lead].get(offsets[:lead], [])


class Checkpoint:
    """A ``torch_dist`` folder opened for reading: ``tensors`` by key, data as views of mapped files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._check_format()
        metadata = read_metadata(self.path)
        self.tensors = dict(self._tensors(metadata))
        self._maps: dict[str, mmap.mmap] = {}

    def _check_format(self) -> None:
        path = self.path / "metadata.json"
        if not path.exists():
            raise BridgeError(
                f"{self.path} has no metadata.json: not a Megatron distributed checkpoint, or one whose save was "
                "interrupted; give the folder that holds metadata.json and *.distcp files"
            )
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise BridgeError(f"{path} is damaged ({error}); save or import the checkpoint again") from error
        for key, expected in FORMAT.items():
            if not isinstance(found, dict) or found.get(key) != expected:
                got = found.get(key) if isinstance(found, dict) else found
                raise BridgeError(
                    f"{path}: {key}={got!r}, only {expected!r} can be read; load the checkpoint with the Megatron "
                    "that wrote it and save it with --ckpt-format torch_dist"
                )

    def _tensors(self, metadata: Metadata) -> Iterator[tuple[str, StoredTensor]]:
        places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._check_files(places)
        for key, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                continue
            chunks = []
            for piece in stored.chunks:
                info = places.get(MetadataIndex(key, piece.offsets))
                if info is None:
                    raise BridgeError(
                        f"{self.path}/.metadata does not say where {key} at {tuple(piece.offsets)} is; save or import "
                        "the checkpoint again"
                    )
                file = str(info.relative_path)
                chunks.append(Chunk(tuple(piece.offsets), tuple(piece.sizes), file, info.offset, info.length))
            yield key, StoredTensor(tuple(stored.size), stored.properties.dtype, chunks)

    def _check_files(self, places: Mapping[MetadataIndex, _StorageInfo]) -> None:
        """Every file that is referred to is inside the folder, there, and long enough."""
        sizes: dict[str, int] = {}
        for index, info in places.items():
            file = str(info.relative_path)
            if file not in sizes:
                pure = PurePosixPath(file)
                if pure.is_absolute() or ".." in pure.parts:
                    raise BridgeError(
                        f"{self.path}/.metadata names {file!r}, which is outside the folder; fetch it again"
                    )
                if not (self.path / file).is_file():
                    raise BridgeError(f"{self.path / file} (for {index.fqn}) is missing; fetch that file again")
                sizes[file] = (self.path / file).stat().st_size
            if not 0 <= info.offset <= info.offset + info.length <= sizes[file]:
                raise BridgeError(
                    f"{self.path / file} is truncated: {index.fqn} ends at byte {info.offset + info.length}, the file "
                    f"has {sizes[file]}; fetch that file again"
                )

    def read(self, key: str, offsets: Shape, shape: Shape, lead: int = 0) -> Tensor:
        """The block of ``shape`` at ``offsets``; a view of the file where one chunk is exactly that block.

        ``lead``: number of leading axes on which the block has length 1, which are dropped from the result.
        """
        stored = self.tensors[key]
        chunks = stored.overlapping(offsets, lead)
        for chunk in chunks:
            if chunk.offsets == offsets and chunk.shape == shape:
                return self._load(chunk, stored.dtype).reshape(shape[lead:])
        block = torch.empty(shape, dtype=stored.dtype)
        covered = 0
        for chunk in chunks:
            covered += self._copy_overlap(chunk, stored.dtype, block, offsets)
        if covered != block.numel():
            raise BridgeError(f"{self.path}: {key} is stored incompletely at {offsets}; save the checkpoint again")
        return block.reshape(shape[lead:])

    def _copy_overlap(self, chunk: Chunk, dtype: torch.dtype, block: Tensor, offsets: Shape) -> int:
        begin = [max(a, b) for a, b in zip(chunk.offsets, offsets, strict=True)]
        ends = zip(chunk.offsets, chunk.shape, offsets, block.shape, strict=True)
        end = [min(a + n, b + m) for a, n, b, m in ends]
        if any(a >= b for a, b in zip(begin, end, strict=True)):
            return 0
        source = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, chunk.offsets, strict=True))
        target = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offsets, strict=True))
        block[target] = self._load(chunk, dtype)[source]
        return math.prod(b - a for a, b in zip(begin, end, strict=True))

    def _load(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        if chunk.file not in self._maps:
            self._maps[chunk.file] = map_file(self.path / chunk.file)
        data = self._maps[chunk.file]
        before, after = frame(chunk.shape, dtype)
        count = math.prod(chunk.shape)
        end = chunk.start + len(before)
        known = chunk.length == len(before) + count * dtype.itemsize + len(after) and data[chunk.start : end] == before
        if known and count:
            return view_of(data, end, dtype, chunk.shape)
        archive = io.BytesIO(data[chunk.start : chunk.start + chunk.length])  # another torch wrote it, or it is empty
        try:
            tensor = torch.load(archive, weights_only=True, map_location="cpu")
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise BridgeError(
                f"{self.path / chunk.file} is damaged at byte {chunk.start}: {error}; fetch it again"
            ) from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.shape or tensor.dtype != dtype:
            raise BridgeError(f"{self.path / chunk.file} is damaged at byte {chunk.start}; fetch it again")
        return tensor

    def _damaged(self, chunk: Chunk) -> BridgeError:
        return BridgeError(f"{self.path / chunk.file} is damaged at byte {chunk.start}; fetch that file again")


class ChunkFile:
    """One ``.distcp`` file, filled from front to back by one thread."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.written: list[tuple[str, Chunk]] = []
        self._descriptor = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self._end = 0

    def append(self, key: str, offsets: Shape, lead: int, tensor: Tensor, dtype: torch.dtype) -> int:
        """Appends ``tensor`` with ``lead`` axes of length 1 put before it. Returns the bytes of data."""
        shape = (1,) * lead + tuple(tensor.shape)
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        before, after = frame(shape, dtype)
        end = write_all(self._descriptor, memoryview(before), start)
        for block in byte_blocks(tensor, dtype):
            end = write_all(self._descriptor, block, end)
        self._end = write_all(self._descriptor, memoryview(after), end)
        self.written.append((key, Chunk(offsets, shape, self.name, start, self._end - start)))
        return tensor.numel() * dtype.itemsize

    def append_object(self, key: str, value: object) -> None:
        """Appends an object, as Megatron stores what is not a tensor: ``torch.save([value])``."""
        buffer = io.BytesIO()
        torch.save([value], buffer)
        end = write_all(self._descriptor, buffer.getbuffer(), self._end)
        self.written.append((key, Chunk((), (), self.name, self._end, end - self._end)))
        self._end = end

    def finish(self) -> None:
        """Syncs and closes the file."""
        os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Closes the file; safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write_metadata(
    folder: Path, tensors: Mapping[str, tuple[Shape, torch.dtype]], files: list[ChunkFile], common: Mapping[str, Any]
) -> None:
    """Writes ``common_state``, ``.metadata`` and, last, ``metadata.json``.

    ``tensors``: key → (global shape, dtype). ``files``: everything written, still open.
    """
    files[0].append_object(COMMON_STATE, dict(common))
    chunks: dict[str, list[Chunk]] = {key: [] for key in tensors}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file in files:
        file.finish()
        for key, chunk in file.written:
            info = _StorageInfo(chunk.file, chunk.start, chunk.length)
            if key == COMMON_STATE:
                storage[MetadataIndex(key)] = info
            else:
                chunks[key].append(chunk)
                storage[MetadataIndex(key, chunk.offsets)] = info
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {COMMON_STATE: BytesStorageMetadata()}
    for key, (shape, dtype) in tensors.items():
        pieces = sorted(chunks[key], key=lambda chunk: chunk.offsets)
        entries[key] = TensorStorageMetadata(
            TensorProperties(dtype=dtype),
            torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)) for piece in pieces],
        )
    metadata = Metadata(entries, storage_data=storage, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    write_file(folder / ".metadata", pickle.dumps(metadata))
    write_file(folder / "metadata.json", json.dumps(FORMAT).encode())
