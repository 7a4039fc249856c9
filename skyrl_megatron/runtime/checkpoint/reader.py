"""Read blocks of global tensors from a role's folder at any layout, verified against the manifest.

A block overlaps one or more stored chunks. Chunks are read in file order. Each is verified, then copied into the
blocks. Only ``.metadata`` and ``common_state`` are unpickled, through allow-lists.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch

from bridges.errors import BridgeError
from bridges.metadata import parse_common_state, parse_metadata
from bridges.rows import Shape
from bridges.torch_dist import Chunk, StoredTensor, common_state_chunk, overlap, slices, stored_tensors, tensor_in
from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint.manifest import (
    BLOCK_BYTES,
    RESTORE,
    FileEntry,
    Manifest,
    check_block,
    read_into,
    read_verified,
)
from skyrl_megatron.runtime.checkpoint.rank_state import Block
from skyrl_megatron.runtime.checkpoint.storage import Storage
from skyrl_megatron.runtime.offload import host_bytes


class HostBuffer:
    """A host buffer that grows to the largest requested size."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, count: int) -> torch.Tensor:
        """Return host memory, [count] uint8; the previous content is lost."""
        if self._bytes.numel() < count:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating the new one
            self._bytes = host_bytes(count)
        return self._bytes[:count]

    def release(self) -> None:
        """Free the memory."""
        self._bytes = torch.empty(0, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor […]; a host copy (at most a bucket) if it is on a GPU."""
    return memoryview(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())


WINDOW_BLOCKS = 12
AHEAD_BLOCKS = 4
"""Blocks that are read ahead while earlier ones are hashed and used, so that the storage is always busy."""


class VerifiedFile:
    """Reads the ``ranges`` (first byte, end) of one file in ascending order. Every block that they touch is read and
    hashed once.

    The bytes that are used are the bytes that were hashed, even if the file changes on disk. Memory: a window of
    :data:`WINDOW_BLOCKS` blocks or the longest range, plus the read-ahead of two storage requests or
    :data:`AHEAD_BLOCKS`.
    """

    def __init__(
        self, storage: Storage, path: str, entry: FileEntry, buffer: HostBuffer, ranges: Iterable[tuple[int, int]]
    ) -> None:
        self._path, self._entry = path, entry
        spans = [(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) for start, stop in ranges]
        self._needed = {block for first, end in spans for block in range(first, end)}
        longest = max((end - first for first, end in spans), default=0)
        # one more than the longest range, which rarely starts at a block
        self._capacity = max(longest + 1, WINDOW_BLOCKS)
        request = max(storage.request_bytes // BLOCK_BYTES, 1)
        requests = [
            (first * BLOCK_BYTES, min(end * BLOCK_BYTES, entry.bytes))
            for first, end in _runs(sorted(self._needed), request)
        ]
        window = self._capacity * BLOCK_BYTES
        ahead = max(2, AHEAD_BLOCKS // request) * request * BLOCK_BYTES
        memory = memoryview(buffer.reserve(window + ahead).numpy())
        self._memory = memory[:window]
        self._begin = self._end = 0  # range of verified bytes that the window holds
        self._ahead = _ReadAhead(storage.open(path), path, requests, memory[window:], request * BLOCK_BYTES)
        self._blocks = self._verified()

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``[start, stop)``, valid until the next call. Raises CheckpointError for a damaged or short
        file."""
        if not (self._begin <= start and stop <= self._end):
            self._fill(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        return self._memory[start - self._begin : stop - self._begin]

    def _fill(self, first: int, end: int) -> None:
        """Read blocks ``[first, end)`` into the window, and needed blocks right after them while they fit."""
        # neighbours that are needed anyway: small tensors of one block are then read from the disk once
        while end in self._needed and end - first < self._capacity:
            end += 1
        begin, end_byte = first * BLOCK_BYTES, min(end * BLOCK_BYTES, self._entry.bytes)
        kept = max(0, self._end - begin) if self._begin <= begin else 0
        if kept:
            # the windows overlap where two tensors share a block; Python copies overlapping memoryviews
            # correctly
            self._memory[:kept] = self._memory[begin - self._begin : begin - self._begin + kept]
        self._begin = self._end = begin  # until the rest is verified, only the kept bytes are valid
        self._end += kept
        while self._end < end_byte:
            start, block = next(self._blocks)
            assert start == self._end, "ranges are read in ascending order"
            self._memory[start - begin : start - begin + len(block)] = block
            self._end += len(block)

    def _verified(self) -> Iterator[tuple[int, memoryview]]:
        """Yield (first byte, bytes) of the needed blocks in order; valid until the next block."""
        for start, data in self._ahead.requests():
            for place in range(0, len(data), BLOCK_BYTES):
                block, index = data[place : place + BLOCK_BYTES], (start + place) // BLOCK_BYTES
                check_block(self._path, index, block, self._entry.blake3[index])
                yield start + place, block

    def close(self) -> None:
        """Close the file."""
        self._ahead.close()


class _ReadAhead:
    """Reads ``requests`` (first byte, end) of a file in a thread, into alternating slots of ``memory``."""

    def __init__(
        self, file: IO[bytes], path: str, requests: list[tuple[int, int]], memory: memoryview, slot_bytes: int
    ) -> None:
        self._file, self._path, self._requests = file, path, requests
        self._stopped = False
        self._free: queue.Queue[memoryview | None] = queue.Queue()
        for start in range(0, len(memory), slot_bytes):
            self._free.put(memory[start : start + slot_bytes])
        self._read: queue.Queue[tuple[int, memoryview, memoryview] | BaseException] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=f"read {path}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for start, stop in self._requests:
                slot = self._free.get()
                if slot is None or self._stopped:
                    return
                self._file.seek(start)
                read_into(self._file, slot[: stop - start], self._path)
                self._read.put((start, slot[: stop - start], slot))
        except BaseException as error:
            self._read.put(error)

    def requests(self) -> Iterator[tuple[int, memoryview]]:
        """Yield (first byte, bytes) of each request in order; valid until the next one. Raises CheckpointError."""
        for _ in self._requests:
            # the thread puts an error in place of data, so this never waits for a thread that ended
            item = self._read.get()
            if isinstance(item, BaseException):
                raise item
            start, data, slot = item
            yield start, data
            # the consumer is done with the slot when it asks for the next request
            self._free.put(slot)

    def close(self) -> None:
        """Stop reading and close the file."""
        self._stopped = True
        # wakes the thread if it waits for a free slot
        self._free.put(None)
        # the thread reads from the file that is closed next
        self._thread.join()
        self._file.close()


def _runs(blocks: list[int], longest: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of runs of consecutive numbers, at most ``longest`` each."""
    first = None
    for number, block in enumerate(blocks):
        first = block if first is None else first
        if number + 1 == len(blocks) or blocks[number + 1] != block + 1 or block + 1 - first == longest:
            yield first, block + 1
            first = None


@contextmanager
def _format_errors() -> Iterator[None]:
    """Raise a BridgeError of the format's code as CheckpointError."""
    try:
        yield
    except BridgeError as error:
        raise CheckpointError(str(error)) from error


class RoleReader:
    """The tensors of one role (``policy``, ``critic``) of a checkpoint. Raises CheckpointError if the metadata are
    damaged, unpickle anything except metadata classes, or point outside of the checkpoint's files."""

    @_format_errors()
    def __init__(self, storage: Storage, folder: str, manifest: Manifest, role: str) -> None:
        if role not in manifest.layouts:
            named = any("/" in name for name in (role, *manifest.roles()))
            fix = "; check the names in trainer.policy.model.lora.adapters" if named else ""
            fix = fix or "; resume a run with these roles, or set trainer.resume_mode=none"
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
        """Return Megatron's ``common_state``: plain values, verified, then unpickled through an allow-list."""
        place = common_state_chunk(self._metadata, self._folder)
        file = self._open(place.file, [place])
        try:
            return parse_common_state(bytes(file.read(place.start, place.start + place.length)), self._folder)
        finally:
            file.close()

    @_format_errors()
    def load(self, blocks: Iterable[Block]) -> None:
        """Fill ``data`` of every block. Raises CheckpointError if a tensor is missing or has another shape, or the
        chunks do not cover a block; some blocks may be overwritten by then."""
        wanted: dict[str, dict[Chunk, list[tuple[Block, Shape, Shape]]]] = defaultdict(lambda: defaultdict(list))
        for block in blocks:
            stored = self._stored(block)
            resized = stored.shape != block.global_shape
            # padding of the vocabulary or of experts may differ between layouts: what the file lacks is zero
            if resized:
                block.data.zero_()
            covered = 0
            for chunk in stored.meeting(block.offsets, block.sizes):
                shared = overlap(chunk.offsets, chunk.sizes, block.offsets, block.sizes)
                assert shared is not None
                covered += math.prod(shared[1])
                wanted[chunk.file][chunk].append((block, *shared))
            if covered != block.data.numel() and not (resized and covered < block.data.numel()):
                raise CheckpointError(
                    f"{self._folder}: {block.key} is incomplete at offsets {block.offsets}; {RESTORE}"
                )
        for name in sorted(wanted):
            # in the order of the file: each block is read and hashed once, whatever the order of tensors
            chunks = sorted(wanted[name], key=lambda chunk: chunk.start)
            file = self._open(name, chunks)
            try:
                for chunk in chunks:
                    self._copy(file, chunk, wanted[name][chunk])
            finally:
                file.close()
        # as large as the largest tensor, and needed only at the start of a run
        self._buffer.release()

    def _stored(self, block: Block) -> StoredTensor:
        stored = self.tensors.get(block.key)
        if stored is None:
            raise CheckpointError(
                f"{self._folder} has no tensor {block.key}; it was saved from another model: set "
                "trainer.policy.model.path to that one"
            )
        if stored.shape != block.global_shape and not (block.flexible and len(stored.shape) == len(block.offsets)):
            fix = "; set trainer.policy.model.lora as in the checkpoint" * block.key.startswith("adapters.")
            raise CheckpointError(
                f"{self._folder}: {block.key} has shape {stored.shape}, the model's is {block.global_shape}{fix}"
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
            raise CheckpointError(f"{path} cannot be read ({error}); check the storage") from error

    def _copy(self, file: VerifiedFile, chunk: Chunk, targets: list[tuple[Block, Shape, Shape]]) -> None:
        archive = file.read(chunk.start, chunk.start + chunk.length)
        source = tensor_in(archive, chunk, self.tensors[targets[0][0].key].dtype, self._folder)
        for block, offsets, sizes in targets:
            target = block.data.view(block.sizes)[slices(offsets, sizes, block.offsets)]
            target.copy_(source[slices(offsets, sizes, chunk.offsets)])
