r"""A durable, append-only log of byte strings: numbered segment files in a folder, with checksums and compaction.

The folder may be on a network file system, where SQLite's locks are unsafe. A segment ``<number, 8 digits>.seg`` is a
sequence of records, little-endian::

    mark     4 bytes   "SKRJ"                          index     uint32  0, 1, 2 … within the segment
    kind     uint32    HEAD, DATA or DROP              sequence  uint64  identity of a DATA record
    segment  uint32    number of the segment           length    uint64  bytes of the payload
    crc      uint32    CRC-32 of the payload           check     uint32  CRC-32 of the 36 bytes before
    payload  length bytes, then "END\n"

The first record is a HEAD. Its payload is a JSON object, number → bytes, of the other segments that the log had when
this one was created, so that a missing segment is noticed. A DROP is a JSON list of segments that no longer belong to
the log; their files may still exist. Compaction keeps the sequence number of a DATA record that it copies.

An interrupted write leaves an incomplete record at the end of the last segment: fewer bytes than its header announces,
or zeros where the file system had only extended the file. That record was never acknowledged, so opening the log
truncates it. Any other mismatch is damage and raises JournalError.

One thread writes. It takes all waiting appends, writes them, and flushes the file once for all of them. An append is
complete when its bytes are on disk. Records that are no longer needed are released. Compaction removes the segments of
which less than half is live, and copies their live records.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import struct
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_megatron.config.resolve import private_folder
from skyrl_megatron.data.folder_lock import FolderLock
from skyrl_megatron.errors import JournalError

SEGMENT_BYTES = 64 * 2**20
HEAD, DATA, DROP = 1, 2, 3
MARK, END = b"SKRJ", b"END\n"
_HEADER = struct.Struct("<4sIIIQQII")
_CHECKED = _HEADER.size - 4
OVERHEAD = _HEADER.size + len(END)
"""Bytes of a record in addition to its payload."""
_MAX_PARTS = os.sysconf("SC_IOV_MAX")
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC

type Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The position of a record: its payload is ``length`` bytes at ``offset`` of the segment's file."""

    kind: int
    segment: int
    index: int
    sequence: int
    offset: int
    length: int
    crc: int

    @property
    def size(self) -> int:
        """Bytes that the record takes in the file."""
        return self.length + OVERHEAD


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"{number:08d}.seg"


def scan(path: Path, number: int, data: Buffer, *, last: bool) -> tuple[list[StoredRecord], int]:
    """Return (records, bytes that they take) of a segment's content. ``last``: it is the last segment of the log, so
    its last record may be incomplete. Raises JournalError with segment, offset and what is lost."""
    view, records, at = memoryview(data), list[StoredRecord](), 0
    while at < len(view):
        record, fault = _record_at(view, at, number, len(records))
        if record is None:
            if last and _is_incomplete(view, at, number):
                break
            raise _damage(path, at, fault, len(records), _count_headers(view, at + 1, number))
        records.append(record)
        at += record.size
    if (not records and not last) or (records and records[0].kind != HEAD):
        raise _damage(path, 0, "its first record is not a HEAD", 0, len(records))
    return records, at


def _record_at(view: memoryview, at: int, number: int, index: int) -> tuple[StoredRecord | None, str]:
    """Return the complete and valid record at an offset, or (None, what is wrong)."""
    header = _header_at(view, at)
    if header is None:
        return None, "the header of a record is damaged"
    if (header.segment, header.index) != (number, index):
        got = f"record {header.index} of segment {header.segment}"
        return None, f"found {got}, expected record {index} of segment {number}"
    end = header.offset + header.length
    if bytes(view[end : end + len(END)]) != END:
        return None, f"record {index} does not end where its header says"
    if zlib.crc32(view[header.offset : end]) != header.crc:
        return None, f"the checksum of record {index} (sequence {header.sequence}) does not match"
    return header, ""


def _header_at(view: memoryview, at: int) -> StoredRecord | None:
    raw = bytes(view[at : at + _HEADER.size])
    if len(raw) < _HEADER.size or raw[:4] != MARK:
        return None
    _, kind, segment, index, sequence, length, crc, check = _HEADER.unpack(raw)
    if check != zlib.crc32(raw[:_CHECKED]) or kind not in (HEAD, DATA, DROP):
        return None
    return StoredRecord(kind, segment, index, sequence, at + _HEADER.size, length, crc)


def _is_incomplete(view: memoryview, at: int, number: int) -> bool:
    """Return whether an offset begins the last record of the file and its write was interrupted."""
    rest = view[at:]
    if not rest[-1]:  # END does not end with a zero
        return not _count_headers(view, at + 1, number)
    header = _header_at(view, at)
    if header is not None:
        return header.offset + header.length + len(END) > len(view)
    return len(rest) < _HEADER.size and MARK[: len(rest)] == bytes(rest[: len(MARK)])


def _count_headers(view: memoryview, at: int, number: int) -> int:
    """Count the valid headers of the segment's records from an offset on."""
    data, found = bytes(view), 0
    while (at := data.find(MARK, at)) >= 0:
        header = _header_at(view, at)
        found += header is not None and header.segment == number
        at += 1
    return found


def _damage(path: Path, at: int, fault: str, before: int, after: int) -> JournalError:
    lost = f"{after} records after it cannot be trusted" if after else "nothing after it can be read"
    return JournalError(
        f"{path} is damaged at byte {at}: {fault}; {before} records before it are valid, {lost}. Restore the file"
        " from a copy, or move the folder away: the run then resumes from its checkpoint and samples its groups again"
    )


class SegmentedLog:
    """The segments in a folder, for one thread. A new segment begins at ``segment_bytes``. Raises OSError for disk
    errors, and JournalError for damage."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.folder, self.segment_bytes = folder, segment_bytes
        self.live: dict[int, StoredRecord] = {}
        """Sequence → record, of the records that are not released."""
        self.sizes: dict[int, int] = {}
        """Segment → bytes of its file."""
        self.flushes = 0
        """Number of flushes to disk."""
        self._descriptor: int | None = None  # of the segment that is written
        self._unflushed: list[StoredRecord] = []
        self._segment = self._next_index = self._next_sequence = 0
        self._open_segments()

    def append(self, payload: Sequence[Buffer]) -> StoredRecord:
        """Write a record. It is on disk, and live, after the next :meth:`flush`."""
        record = self._write(DATA, self._next_sequence, payload)
        self._next_sequence += 1
        return record

    def flush(self) -> None:
        """Return once everything that was written is on disk."""
        assert self._descriptor is not None
        os.fdatasync(self._descriptor)
        self.flushes += 1
        self.live |= {record.sequence: record for record in self._unflushed if record.kind == DATA}
        self._unflushed = []

    def release(self, sequences: Iterable[int]) -> None:
        """Remove records from the live ones, so that compaction can free them."""
        for sequence in sequences:
            self.live.pop(sequence, None)

    def read(self, sequence: int) -> bytes:
        """Return the payload of a record. Raises KeyError if it is not live, JournalError if it is damaged."""
        while True:
            record = self.live[sequence]
            path = self._path(record.segment)
            try:
                with path.open("rb") as file:
                    file.seek(record.offset)
                    data = file.read(record.length)
            except FileNotFoundError:
                if self.live.get(sequence) is not record:  # compaction has moved it
                    continue
                raise
            if zlib.crc32(data) != record.crc:
                raise JournalError(
                    f"{path} is damaged: record {sequence} at byte {record.offset} has changed; check the disk, and "
                    "resume a checkpoint"
                )
            return data

    def compact(self) -> None:
        """Remove the closed segments of which less than half is live, and copy their live records."""
        if self._unflushed:
            self.flush()
        live: dict[int, list[StoredRecord]] = {number: [] for number in self.sizes if number != self._segment}
        for record in self.live.values():
            if record.segment in live:
                live[record.segment].append(record)
        gone = [number for number in live if 2 * sum(record.size for record in live[number]) < self.sizes[number]]
        if not gone:
            return
        for number in gone:
            for record in sorted(live[number], key=lambda record: record.sequence):
                self._write(DATA, record.sequence, [self.read(record.sequence)])
        self._write(DROP, self._next_sequence, [json.dumps(gone).encode()])
        self.flush()
        for number in gone:
            del self.sizes[number]
        self._remove_files(gone)

    def close(self) -> None:
        """Close the last segment without a flush."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, kind: int, sequence: int, payload: Sequence[Buffer]) -> StoredRecord:
        length, crc = 0, 0
        for part in payload:
            length, crc = length + len(part), zlib.crc32(part, crc)
        size = self.sizes.get(self._segment, 0) + length + OVERHEAD
        if self._descriptor is None or (self._next_index > 1 and size > self.segment_bytes):
            self._begin_segment()
        assert self._descriptor is not None
        index, at = self._next_index, self.sizes[self._segment]
        fields = _HEADER.pack(MARK, kind, self._segment, index, sequence, length, crc, 0)[:_CHECKED]
        _write_all(self._descriptor, [fields + struct.pack("<I", zlib.crc32(fields)), *payload, END])
        record = StoredRecord(kind, self._segment, index, sequence, at + _HEADER.size, length, crc)
        self._next_index, self.sizes[self._segment] = index + 1, at + record.size
        self._unflushed.append(record)
        return record

    def _begin_segment(self) -> None:
        if self._descriptor is not None:
            self.flush()
            self.close()
        others = json.dumps(self.sizes).encode()
        self._segment, self._next_index = self._segment + 1, 0
        self._descriptor = os.open(self._path(self._segment), _APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self.sizes[self._segment] = 0
        self._write(HEAD, self._next_sequence, [others])
        self.flush()
        self._sync_folder()

    def _path(self, number: int) -> Path:
        return self.folder / segment_name(number)

    def _remove_files(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._path(number).unlink()
        self._sync_folder()

    def _sync_folder(self) -> None:
        """Make the names in the folder durable."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # ------------------------------------------------------------------ opening
    def _open_segments(self) -> None:
        numbers = sorted(int(path.stem) for path in self.folder.glob("[0-9]" * 8 + ".seg"))
        if not numbers:
            return
        newest = self._segment = numbers[-1]
        records, size, data = self._scan(newest, last=True)
        if not records:  # its HEAD is incomplete, so the segment holds nothing
            self._remove_files([numbers.pop()])
            if not numbers:
                return
            records, size, data = self._scan(numbers[-1], last=False)
        others = _other_segments(records, data)
        self._check_sizes(others, numbers[-1])
        for number in numbers[:-1]:
            if number in others:
                self._add_segment(number, *self._scan(number, last=False)[:2])
            else:  # dropped, but its file was not removed
                self._remove_files([number])
        self._add_segment(numbers[-1], records, size)
        if numbers[-1] == newest:  # append to it, after the last complete record
            self._descriptor, self._next_index = os.open(self._path(newest), _APPEND), len(records)
            if size < len(data):
                os.ftruncate(self._descriptor, size)
                os.fsync(self._descriptor)

    def _scan(self, number: int, *, last: bool) -> tuple[list[StoredRecord], int, bytes]:
        data = self._path(number).read_bytes()
        return *scan(self._path(number), number, data, last=last), data

    def _check_sizes(self, sizes: Mapping[int, int], last: int) -> None:
        for number, size in sizes.items():
            path = self._path(number)
            found = path.stat().st_size if path.exists() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes"
                raise JournalError(
                    f"{path} {state}, but {segment_name(last)} lists it with {size} bytes: records are lost. Restore"
                    " it from a copy, or move the folder away: the run then resumes from its checkpoint"
                )

    def _add_segment(self, number: int, records: Sequence[StoredRecord], size: int) -> None:
        self.sizes[number] = size
        for record in records:
            if record.kind == DATA:
                self.live[record.sequence] = record
            self._next_sequence = max(self._next_sequence, record.sequence + (record.kind == DATA))


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    views = [view for part in parts if len(view := memoryview(part).cast("B"))]
    while views:
        written = os.writev(descriptor, views[:_MAX_PARTS])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def _other_segments(records: Sequence[StoredRecord], data: Buffer) -> dict[int, int]:
    """Return number → bytes of the segments that belong to the log besides the last one, whose records these are."""

    def content(record: StoredRecord) -> Any:
        return json.loads(bytes(data[record.offset : record.offset + record.length]))

    sizes = {int(number): size for number, size in content(records[0]).items()}
    for record in records:
        if record.kind == DROP:
            for number in content(record):
                del sizes[number]
    return sizes


type _Append = tuple[Callable[[], Sequence[Buffer]], Future[int]]


class Journal:
    """The log in a folder, which one process at a time has open. Methods may be called from any thread.

    ``segment_bytes``: maximum size of a segment; ``setting``: the configuration key of the folder, for errors. Raises
    JournalError for damage, CheckpointError while another process has the folder open.
    """

    def __init__(self, folder: str | Path, *, segment_bytes: int = SEGMENT_BYTES, setting: str = "folder") -> None:
        self.folder = Path(folder)
        try:
            private_folder(self.folder)
        except OSError as error:
            raise JournalError(f"{folder} cannot be made ({error.strerror}); check {setting}") from error
        self._lock = FolderLock(str(folder), setting)
        try:
            self.log = SegmentedLog(self.folder, segment_bytes)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                raise JournalError(f"{folder} cannot be opened: {error}; check {setting}") from error
            raise
        self._failure: JournalError | None = None
        self._closing, self._closed = threading.Lock(), False
        self._queue: queue.SimpleQueue[_Append | list[int] | Future[None] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._work, name="journal", daemon=True)
        self._writer.start()

    def submit(self, *payload: Buffer) -> Future[int]:
        """Begin to append a record of some parts, which must not change until it is done, and return a future of its
        sequence number. The future raises JournalError once any write has failed."""
        return self._submit(lambda: payload)

    async def append(self, encode: Callable[[], Sequence[Buffer]]) -> int:
        """Append the parts that ``encode`` returns in the writer's thread. Return the record's sequence number once it
        is on disk. Raises as :meth:`submit`, and what ``encode`` raises; then nothing is appended."""
        return await asyncio.wrap_future(self._submit(encode))

    def release(self, sequences: Collection[int]) -> None:
        """Mark records as no longer needed; compaction frees them. Until then they are live again whenever the journal
        is reopened."""
        self._queue.put(list(sequences))

    def compact(self) -> Future[None]:
        """Begin to free the disk space of released records."""
        future: Future[None] = Future()
        self._enqueue(future)
        return future

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield (sequence, payload) of all live records, by sequence."""
        for sequence in sorted(self.log.live):
            yield sequence, self.read(sequence)

    def read(self, sequence: int) -> bytes:
        """Return the payload of a record. Raises KeyError if it is not live, JournalError if it is damaged."""
        return self.log.read(sequence)

    def close(self) -> None:
        """Write the waiting appends and release the folder. May be called twice."""
        with self._closing:
            if not self._closed:
                self._queue.put(None)
            self._closed = True
        self._writer.join()
        self._lock.release()

    def _submit(self, encode: Callable[[], Sequence[Buffer]]) -> Future[int]:
        future: Future[int] = Future()
        self._enqueue((encode, future))
        return future

    def _enqueue(self, item: _Append | Future[None]) -> None:
        with self._closing:
            if self._closed:
                raise JournalError(f"{self.folder} is closed")
            self._queue.put(item)

    # ------------------------------------------------------------------ the writer's thread
    def _work(self) -> None:
        running = True
        while running:
            items = [self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get())
            appends: list[_Append] = []
            for item in items:
                if isinstance(item, tuple):
                    appends.append(item)
                    continue
                self._append_all(appends)
                appends = []
                if isinstance(item, Future):
                    self._compact_for(item)
                elif item is None:
                    running = False
                else:
                    self.log.release(item)
            self._append_all(appends)
        self.log.close()

    def _append_all(self, appends: Sequence[_Append]) -> None:
        waiting = [(encode, future) for encode, future in appends if future.set_running_or_notify_cancel()]
        written: list[tuple[Future[int], StoredRecord]] = []
        try:
            self._raise_failure()
            for encode, future in waiting:
                try:
                    parts = encode()
                except Exception as error:  # of this record alone
                    future.set_exception(error)
                    continue
                written.append((future, self.log.append(parts)))
            if written:
                self.log.flush()
        except Exception as error:
            failure = self._fail(error)
            for _, future in waiting:
                if not future.done():
                    future.set_exception(failure)
            return
        for future, record in written:
            future.set_result(record.sequence)

    def _compact_for(self, future: Future[None]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            self._raise_failure()
            self.log.compact()
        except Exception as error:
            future.set_exception(self._fail(error))
        else:
            future.set_result(None)

    def _raise_failure(self) -> None:
        """Raise the error of an earlier write: after it, the content of the file is unknown."""
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: Exception) -> JournalError:
        if self._failure is None:
            fix = "free space there if the disk is full, and start the run again: it resumes from what is on disk"
            made = JournalError(f"{self.folder} cannot be written: {error}; {fix}")
            self._failure = error if isinstance(error, JournalError) else made
        return self._failure
