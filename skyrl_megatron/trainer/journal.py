r"""A durable, append-only log of byte strings: segments in a folder, checksums, compaction.

The folder may be on a network file system, where the locks of SQLite are unsafe.

A segment ``<number, 8 digits>.seg`` is a sequence of records, little-endian::

    mark     4 bytes   "SKRJ"                          place     uint32  0, 1, 2 … within the segment
    kind     uint32    HEAD, DATA or DROP              sequence  uint64  identity of what a DATA record holds
    segment  uint32    number of the segment           length    uint64  bytes of the payload
    crc      uint32    CRC-32 of the payload           check     uint32  CRC-32 of the 36 bytes before
    payload  length bytes
    end      4 bytes   "END\n"

The first record is a HEAD; its payload is a JSON object of the other segments that belonged to the journal when this
one was begun: number to bytes. A DROP is a JSON list of segments that belong to it no more; their files may be there
still. A DATA record that compaction copies keeps its sequence number.

How a file ends says what happened. A write that was cut off leaves a record without its end: fewer bytes than it
announces, or zeros in their place where the file system had only enlarged the file. Such a record was never
acknowledged, and is cut off. Whatever else does not fit is damage, and raises: a byte that changed, a record that is
missing, an end that is missing before other records.

Which segments belong to the log stands in the log itself, so that one that is missing is noticed. Opening cuts off a
record that was not written to its end, and refuses any other damage.

A thread of its own writes. It takes all appends that wait, writes them, and flushes the file once for all: while one
flush is under way, the next appends gather. An append is done when its bytes are on the disk.

What is not needed any more is settled, and compaction frees its place: segments of which less than half is held are
removed, and what is held of them is copied.
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
from skyrl_megatron.errors import DataError, JournalError
from skyrl_megatron.runtime.checkpoint.storage import FolderLock

_PARTS = os.sysconf("SC_IOV_MAX")


class AppendedFile:
    """A file open for appending. ``new``: it must not be there yet. Every method raises OSError."""

    def __init__(self, path: Path, *, new: bool) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0)
        self.path = path
        self._descriptor = os.open(path, flags, 0o644)
        self.size = os.fstat(self._descriptor).st_size

    def write(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Append all parts."""
        views = [view for part in parts if len(view := memoryview(part).cast("B"))]
        while views:
            written = os.writev(self._descriptor, views[:_PARTS])
            self.size += written
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]

    def cut(self, size: int) -> None:
        """Leave the first ``size`` bytes, durably."""
        os.ftruncate(self._descriptor, size)
        self.size = size
        self.flush()

    def flush(self) -> None:
        """Return once everything is on the disk."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file without flushing it."""
        os.close(self._descriptor)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


HEAD, DATA, DROP = 1, 2, 3
MARK, END = b"SKRJ", b"END\n"
_FIELDS = struct.Struct("<4sIIIQQII")
_CHECKED = _FIELDS.size - 4
OVERHEAD = _FIELDS.size + len(END)
"""Bytes of a record beside its payload."""

type Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """Where a record lies: its payload is ``length`` bytes at ``offset`` of the file."""

    kind: int
    segment: int
    place: int
    sequence: int
    offset: int
    length: int
    crc: int

    @property
    def size(self) -> int:
        """Bytes that the record takes in the file."""
        return self.length + OVERHEAD


def segment_name(number: int) -> str:
    """Return the file's name."""
    return f"{number:08d}.seg"


def frame(
    kind: int, segment: int, place: int, sequence: int, payload: Sequence[Buffer], at: int
) -> tuple[StoredRecord, list[Buffer]]:
    """Return a record to be written at byte ``at``, and its parts; ``payload`` is not copied."""
    length, crc = 0, 0
    for part in payload:
        length, crc = length + len(part), zlib.crc32(part, crc)
    fields = _FIELDS.pack(MARK, kind, segment, place, sequence, length, crc, 0)[:_CHECKED]
    record = StoredRecord(kind, segment, place, sequence, at + _FIELDS.size, length, crc)
    return record, [fields + struct.pack("<I", zlib.crc32(fields)), *payload, END]


def head_payload(sizes: Mapping[int, int]) -> bytes:
    """Return the payload of a HEAD: number to bytes of the segments before."""
    return json.dumps(sizes).encode()


def drop_payload(numbers: Sequence[int]) -> bytes:
    """Return the payload of a DROP."""
    return json.dumps(numbers).encode()


def belonging(records: Sequence[StoredRecord], data: Buffer) -> dict[int, int]:
    """Return number to bytes of the segments that belong to a journal besides its last one, which says so."""

    def content(record: StoredRecord) -> Any:
        return json.loads(bytes(data[record.offset : record.offset + record.length]))

    found = {int(number): size for number, size in content(records[0]).items()}
    for record in records:
        if record.kind == DROP:
            for number in content(record):
                del found[number]
    return found


def scan(path: Path, number: int, data: Buffer, *, last: bool) -> tuple[list[StoredRecord], int]:
    """Return (records, bytes that they take) of a segment's content. ``last``: of the journal, whose last record may
    have been cut off. Raises JournalError naming segment, offset and what is lost."""
    view, records, at = memoryview(data), list[StoredRecord](), 0
    while at < len(view):
        record, fault = _record_at(view, at, number, len(records))
        if record is None:
            if last and _is_cut_off(view, at, number):
                break
            raise _damage(path, at, fault, len(records), _following(view, at + 1, number))
        records.append(record)
        at += record.size
    if (not records and not last) or (records and records[0].kind != HEAD):
        raise _damage(path, 0, "its first record is no head", 0, len(records))
    return records, at


def _record_at(view: memoryview, at: int, number: int, place: int) -> tuple[StoredRecord | None, str]:
    """Return the whole and sound record at an offset, or (None, what is wrong)."""
    header = _header_at(view, at)
    if header is None:
        return None, "the header of a record is damaged"
    if (header.segment, header.place) != (number, place):
        return None, f"record {header.place} of segment {header.segment} stands where record {place} belongs"
    end = header.offset + header.length
    if bytes(view[end : end + len(END)]) != END:
        return None, f"record {place} does not end where it says"
    if zlib.crc32(view[header.offset : end]) != header.crc:
        return None, f"the checksum of record {place} (sequence {header.sequence}) does not fit"
    return header, ""


def _header_at(view: memoryview, at: int) -> StoredRecord | None:
    raw = bytes(view[at : at + _FIELDS.size])
    if len(raw) < _FIELDS.size or raw[:4] != MARK:
        return None
    _, kind, segment, place, sequence, length, crc, check = _FIELDS.unpack(raw)
    if check != zlib.crc32(raw[:_CHECKED]) or kind not in (HEAD, DATA, DROP):
        return None
    return StoredRecord(kind, segment, place, sequence, at + _FIELDS.size, length, crc)


def _is_cut_off(view: memoryview, at: int, number: int) -> bool:
    """Return whether what begins at an offset is the last thing that was written, and was not written to its end."""
    rest = view[at:]
    if not rest[-1]:  # END does not end with a zero
        return not _following(view, at + 1, number)
    header = _header_at(view, at)
    if header is not None:
        return header.offset + header.length + len(END) > len(view)
    return len(rest) < _FIELDS.size and MARK[: len(rest)] == bytes(rest[: len(MARK)])


def _following(view: memoryview, at: int, number: int) -> int:
    """Count records of the segment whose headers are sound, at an offset and after it."""
    data, found = bytes(view), 0
    while (at := data.find(MARK, at)) >= 0:
        header = _header_at(view, at)
        found += header is not None and header.segment == number
        at += 1
    return found


def _damage(path: Path, at: int, fault: str, before: int, after: int) -> JournalError:
    lost = f"{after} records behind it cannot be trusted" if after else "nothing can be read behind it"
    return JournalError(
        f"{path} is damaged at byte {at}: {fault}; {before} records before it are sound, {lost}. Restore the file"
        " from a copy, or move the folder away: the run then goes on from its checkpoint and samples again what was in"
        " it"
    )


class SegmentedLog:
    """The log in a folder. ``segment_bytes``: where a new segment begins. Raises OSError where the disk does, and
    JournalError for damage."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.folder, self.segment_bytes = folder, segment_bytes
        self.held: dict[int, StoredRecord] = {}
        """Sequence → the record, of what is not settled."""
        self.sizes: dict[int, int] = {}
        """Segment → bytes of its file."""
        self.flushes = 0
        """How often the disk was waited for."""
        self.cut_off = 0
        """Bytes of a record that was not written to its end, and was cut off."""
        self._file: AppendedFile | None = None
        self._written: list[StoredRecord] = []
        self._segment = self._place = self._next_sequence = 0
        self._open_segments()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.sizes.values())

    def append(self, payload: Sequence[Buffer]) -> StoredRecord:
        """Write a record; it is on the disk, and held, after the next :meth:`flush`."""
        record = self._write(DATA, self._next_sequence, payload)
        self._next_sequence += 1
        return record

    def flush(self) -> None:
        """Return once all that was written is on the disk."""
        assert self._file is not None
        self._file.flush()
        self.flushes += 1
        self._hold(self._written)
        self._written = []

    def settle(self, sequences: Iterable[int]) -> None:
        """Hold records no longer."""
        for sequence in sequences:
            self.held.pop(sequence, None)

    def read(self, sequence: int) -> bytes:
        """Return the payload of a record. Raises KeyError for one that is not held, JournalError for a damaged one."""
        while True:
            record = self.held[sequence]
            path = self._path(record.segment)
            try:
                with path.open("rb") as file:
                    file.seek(record.offset)
                    data = file.read(record.length)
            except FileNotFoundError:
                if self.held.get(sequence) is not record:  # compaction has moved it
                    continue
                raise
            if zlib.crc32(data) != record.crc:
                raise JournalError(f"{path} is damaged: record {sequence} at byte {record.offset} has changed")
            return data

    def compact(self) -> None:
        """Remove all segments but the last of which less than half is held, and copy what is."""
        if self._written:
            self.flush()
        live: dict[int, list[StoredRecord]] = {number: [] for number in self.sizes}
        for record in self.held.values():
            live[record.segment].append(record)
        gone = [
            number
            for number, size in self.sizes.items()
            if (self._file is None or number != self._segment) and 2 * sum(r.size for r in live[number]) < size
        ]
        if not gone:
            return
        for number in gone:
            for record in sorted(live[number], key=lambda record: record.sequence):
                self._write(DATA, record.sequence, [self.read(record.sequence)])
        self._write(DROP, self._next_sequence, [drop_payload(gone)])
        self.flush()
        for number in gone:
            del self.sizes[number]
            self._path(number).unlink()
        sync_folder(self.folder)

    def close(self) -> None:
        """Close the last segment without flushing it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # ------------------------------------------------------------------ writing
    def _write(self, kind: int, sequence: int, payload: Sequence[Buffer]) -> StoredRecord:
        size = sum(map(len, payload)) + OVERHEAD
        if self._file is None or (self._place > 1 and self._file.size + size > self.segment_bytes):
            self._begin_segment()
        assert self._file is not None
        record, parts = frame(kind, self._segment, self._place, sequence, payload, self._file.size)
        self._file.write(parts)
        self._place += 1
        self.sizes[self._segment] = self._file.size
        self._written.append(record)
        return record

    def _begin_segment(self) -> None:
        if self._file is not None:
            self.flush()
            self._file.close()
        self._segment, self._place = self._segment + 1, 0
        self._file = AppendedFile(self._path(self._segment), new=True)
        self._write(HEAD, self._next_sequence, [head_payload(self.sizes)])
        self.flush()
        sync_folder(self.folder)

    def _hold(self, records: Iterable[StoredRecord]) -> None:
        self.held |= {record.sequence: record for record in records if record.kind == DATA}

    def _path(self, number: int) -> Path:
        return self.folder / segment_name(number)

    # ------------------------------------------------------------------ opening
    def _open_segments(self) -> None:
        numbers = sorted(int(path.stem) for path in self.folder.glob("[0-9]" * 8 + ".seg"))
        if not numbers:
            return
        last = self._segment = numbers[-1]
        records, size, data = self._scan(last, last=True)
        if not records:  # its head was not written to its end, so it holds nothing
            self._remove(numbers.pop())
            if not numbers:
                return
            records, size, data = self._scan(numbers[-1], last=False)
        others = belonging(records, data)
        self._check_files(others, numbers[-1])
        for number in numbers[:-1]:
            if number in others:
                self._take(number, *self._scan(number, last=False)[:2])
            else:  # dropped, but its file was not removed
                self._remove(number)
        self._take(numbers[-1], records, size)
        if numbers[-1] == last:
            self._continue(records, size)

    def _check_files(self, sizes: Mapping[int, int], last: int) -> None:
        for number, size in sizes.items():
            path = self._path(number)
            found = path.stat().st_size if path.exists() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes"
                raise JournalError(
                    f"{path} {state}, and {segment_name(last)} knows it with {size} bytes: records are lost. Restore"
                    " it from a copy, or move the folder away: the run then goes on from its checkpoint"
                )

    def _scan(self, number: int, *, last: bool) -> tuple[list[StoredRecord], int, bytes]:
        data = self._path(number).read_bytes()
        return *scan(self._path(number), number, data, last=last), data

    def _take(self, number: int, records: Sequence[StoredRecord], size: int) -> None:
        self.sizes[number] = size
        for record in records:
            self._next_sequence = max(self._next_sequence, record.sequence + (record.kind == DATA))
        self._hold(records)

    def _continue(self, records: Sequence[StoredRecord], size: int) -> None:
        """Go on in the last segment, without a record that was cut off."""
        path = self._path(self._segment)
        self.cut_off = path.stat().st_size - size
        self._file, self._place = AppendedFile(path, new=False), len(records)
        if self.cut_off:
            self._file.cut(size)

    def _remove(self, number: int) -> None:
        self._path(number).unlink()
        sync_folder(self.folder)


SEGMENT_BYTES = 64 * 2**20
type _Append = tuple[Callable[[], Sequence[Buffer]], Future[int]]


class Journal:
    """The log in a folder, which one process at a time has open. Methods may be called from any thread.

    ``segment_bytes``: where a new segment begins; ``limit_bytes``: of all segments, None for no limit; ``setting``:
    what chooses the folder, for errors. Raises JournalError for damage (:mod:`skyrl_megatron.trainer.journal`),
    CheckpointError while another process has it open.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        limit_bytes: int | None = None,
        setting: str = "folder",
    ) -> None:
        self.folder, self.limit_bytes = Path(folder), limit_bytes
        try:
            private_folder(self.folder)
        except OSError as error:
            raise JournalError(f"{folder} cannot be made ({error.strerror}); check {setting}") from error
        self._lock = FolderLock(str(folder), setting)
        try:
            self.log = SegmentedLog(self.folder, segment_bytes)
        except OSError as error:
            self._lock.release()
            raise JournalError(f"{folder} cannot be opened: {error}; check {setting}") from error
        except BaseException:
            self._lock.release()
            raise
        self._failure: JournalError | None = None
        self._closing, self._closed = threading.Lock(), False
        self._queue: queue.SimpleQueue[_Append | list[int] | Future[None] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._work, name="journal", daemon=True)
        self._writer.start()

    def submit(self, *payload: Buffer) -> Future[int]:
        """Begin to append a record of some parts, which must stay as they are until it is done; the result is its
        sequence number. The result raises JournalError when the journal is full, and once any write has failed."""
        return self.submit_made(lambda: payload)

    def submit_made(self, make: Callable[[], Sequence[Buffer]]) -> Future[int]:
        """As :meth:`submit`, of parts that the writer's thread makes. Where that raises DataError, so does the
        result, and nothing is appended."""
        future: Future[int] = Future()
        with self._closing:
            if self._closed:
                raise JournalError(f"{self.folder} is closed")
            self._queue.put((make, future))
        return future

    async def append(self, *payload: Buffer) -> int:
        """Append a record; it is on the disk on return. As :meth:`submit`."""
        return await asyncio.wrap_future(self.submit(*payload))

    async def append_made(self, make: Callable[[], Sequence[Buffer]]) -> int:
        """Append a record; it is on the disk on return. As :meth:`submit_made`."""
        return await asyncio.wrap_future(self.submit_made(make))

    def settle(self, sequences: Collection[int]) -> None:
        """Hold records no longer; compaction frees their place. Those that were not freed are held again after the
        journal was opened anew."""
        self._queue.put(list(sequences))

    def compact(self) -> Future[None]:
        """Begin to free the place of settled records."""
        future: Future[None] = Future()
        with self._closing:
            if self._closed:
                raise JournalError(f"{self.folder} is closed")
            self._queue.put(future)
        return future

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield (sequence, payload) of all that is held, by sequence."""
        for sequence in sorted(self.log.held):
            yield sequence, self.read(sequence)

    def read(self, sequence: int) -> bytes:
        """Return the payload of a record. Raises KeyError for one that is not held, JournalError for a damaged one."""
        return self.log.read(sequence)

    def close(self) -> None:
        """Write what waits, and give the folder back. May be called twice."""
        with self._closing:
            if not self._closed:
                self._queue.put(None)
            self._closed = True
        self._writer.join()
        self._lock.release()

    # ------------------------------------------------------------------ the writer's thread
    def _work(self) -> None:
        going = True
        while going:
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
                    going = False
                else:
                    self.log.settle(item)
            self._append_all(appends)
        self.log.close()

    def _append_all(self, appends: Sequence[_Append]) -> None:
        waiting = [(make, future) for make, future in appends if future.set_running_or_notify_cancel()]
        written: list[tuple[Future[int], StoredRecord]] = []
        try:
            self._refuse_after_failure()
            for make, future in waiting:
                try:
                    parts = make()
                except DataError as error:
                    future.set_exception(error)
                    continue
                size = sum(map(len, parts)) + OVERHEAD
                if self._has_room(size):
                    written.append((future, self.log.append(parts)))
                else:
                    future.set_exception(self._full(size))
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

    def _has_room(self, size: int) -> bool:
        if self.limit_bytes is None or self.log.stored_bytes + size <= self.limit_bytes:
            return True
        self.log.compact()
        return self.log.stored_bytes + size <= self.limit_bytes

    def _full(self, size: int) -> JournalError:
        return JournalError(
            f"{self.folder} holds {self.log.stored_bytes} bytes, and {size} more would exceed its limit of"
            f" {self.limit_bytes}: save checkpoints more often, keep fewer of them, or raise the limit"
        )

    def _compact_for(self, future: Future[None]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            self._refuse_after_failure()
            self.log.compact()
        except Exception as error:
            future.set_exception(self._fail(error))
        else:
            future.set_result(None)

    def _refuse_after_failure(self) -> None:
        """Raise the error of an earlier write: after it nobody knows what is on the disk."""
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: Exception) -> JournalError:
        if self._failure is None:
            fix = "free space there if it is full, and start the run again: it goes on from what is on the disk"
            made = JournalError(f"{self.folder} cannot be written: {error}; {fix}")
            self._failure = error if isinstance(error, JournalError) else made
        return self._failure
