"""The bytes that ``torch.save`` puts around a tensor's data, so that data can be streamed between them.

A ``torch_dist`` checkpoint stores every chunk as a ``torch.save`` archive (an uncompressed zip). What surrounds the
data depends on shape and dtype only, so it is made once per kind of chunk with ``torch.serialization.skip_data`` and
the data itself is never copied into a buffer.
"""

from __future__ import annotations

import io
import threading
import zipfile
from functools import lru_cache
from typing import IO, cast

import torch

from bridges.rows import Shape

_CHECKSUMS = threading.Lock()  # the switch for zip checksums is global to the process


class _Hollow(io.RawIOBase):
    """Collects what is written; a relative seek marks the place of the data."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.after = bytearray()
        self.hole: int | None = None

    def write(self, data: object) -> int:
        piece = bytes(data)  # type: ignore[call-overload]
        (self.before if self.hole is None else self.after).extend(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == 1 and self.hole is None, "torch.save leaves one hole per tensor"
        self.hole = offset
        return self.tell()

    def tell(self) -> int:
        return len(self.before) + (self.hole or 0) + len(self.after)


@lru_cache(maxsize=256)
def frame(shape: Shape, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Bytes before and after the data in ``torch.save`` of a contiguous tensor. Zip checksums are left out, as
    ``torch.serialization.set_crc32_options(False)`` does; ``torch.load`` does not read them."""
    file = _Hollow()
    with _CHECKSUMS, torch.serialization.skip_data():
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], file))
        finally:
            torch.serialization.set_crc32_options(before)
    return bytes(file.before), bytes(file.after)


def data_start(archive: memoryview, count: int) -> int:
    """Return where the ``count`` bytes of data begin in ``torch.save`` of a tensor that another torch made.

    They are found by the zip's own directory, without unpickling. Raises ValueError when it is no such archive.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as found:
            info = next(each for each in found.infolist() if each.filename.endswith("/data/0"))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ValueError(f"not an archive of a tensor ({error})") from error
    header = info.header_offset
    names = int.from_bytes(archive[header + 26 : header + 28], "little")
    extra = int.from_bytes(archive[header + 28 : header + 30], "little")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != count:
        raise ValueError(f"{info.file_size} bytes of data instead of {count}")
    return header + 30 + names + extra
