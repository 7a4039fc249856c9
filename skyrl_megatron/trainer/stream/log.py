"""Segments in a folder as one log, for one thread: writing, settling, compaction, and opening what is there.

Which segments belong to the log stands in the log itself, so that one that is missing is noticed. Opening cuts off a
record that was not written to its end, and refuses any other damage.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from skyrl_megatron.errors import JournalError
from skyrl_megatron.trainer.stream.appending import AppendedFile, sync_folder
from skyrl_megatron.trainer.stream.segment import (
    DATA,
    DROP,
    HEAD,
    OVERHEAD,
    Buffer,
    StoredRecord,
    belonging,
    drop_payload,
    frame,
    head_payload,
    scan,
    segment_name,
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
