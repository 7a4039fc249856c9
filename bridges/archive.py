"""The bytes that ``torch.save`` puts around a tensor's data, so that data can be streamed between them.

A ``torch_dist`` checkpoint stores every chunk as a ``torch.save`` archive (an uncompressed zip). What surrounds the
data depends on shape and dtype only, so it is made once per kind of chunk with ``torch.serialization.skip_data`` and
the data itself is never copied into a buffer.
"""

from __future__ import annotations

import io
import math
import threading
from functools import lru_cache
from typing import IO, Any, cast

import torch

from bridges.hf_io import DTYPES
from bridges.metadata import zipped
from bridges.pickles import Call, load
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
    """Return bytes before and after the data in ``torch.save`` of a contiguous tensor. Zip checksums are left out, as
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
"""What the pickle of a tensor names: (offset, size, stride) of its data are read, and no tensor is made."""


def parse_archive(archive: memoryview, shape: Shape, dtype: torch.dtype) -> tuple[int, tuple[int, Shape, Shape]]:
    """Return where the data begins in ``torch.save`` of a tensor that another torch made, and its layout there:
    (offset, size, stride), in elements.

    Raises ValueError when it is no such archive, or holds another shape.
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
    """Return whether an unpickled (offset, size, stride) says where the elements are among ``count``."""
    if not isinstance(layout, tuple) or len(layout) != 3 or layout[1] != shape or not isinstance(layout[2], tuple):
        return False
    offset, _, stride = layout
    if len(stride) != len(shape) or any(type(each) is not int or each < 0 for each in (offset, *stride)):
        return False
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return not count or last < count
