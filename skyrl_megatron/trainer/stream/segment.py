"""One file of a journal: the format of its records, and reading it back.

A segment ``<number, 8 digits>.seg`` is a sequence of records, little-endian::

    mark     4 bytes   "SKRJ"                          place     uint32  0, 1, 2 … within the segment
    kind     uint32    HEAD, DATA or DROP              sequence  uint64  identity of what a DATA record holds
    segment  uint32    number of the segment           length    uint64  bytes of the payload
    crc      uint32    CRC-32 of the payload           check     uint32  CRC-32 of the 36 bytes before
    payload  length bytes
    end      4 bytes   "END\\n"

The first record is a HEAD; its payload is a JSON object of the other segments that belonged to the journal when this
one was begun: number to bytes. A DROP is a JSON list of segments that belong to it no more; their files may be there
still. A DATA record that compaction copies keeps its sequence number.

How a file ends says what happened. A write that was cut off leaves a record without its end: fewer bytes than it
announces, or zeros in their place where the file system had only enlarged the file. Such a record was never
acknowledged, and is cut off. Whatever else does not fit is damage, and raises: a byte that changed, a record that is
missing, an end that is missing before other records.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_megatron.errors import JournalError

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
