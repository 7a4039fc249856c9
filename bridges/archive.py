"""The bytes that ``torch.save`` puts around a tensor's data, so that data can be streamed between them.

A ``torch_dist`` checkpoint stores every chunk as a ``torch.save`` archive (an uncompressed zip). What surrounds the
data depends on shape and dtype only, so it is made once per kind of chunk with ``torch.serialization.skip_data`` and
the data itself is never copied into a buffer.
"""

from __future__ import annotations

import io
import math
import pickle
import threading
import zipfile
from functools import lru_cache
from typing import IO, Any, cast

import torch

from bridges.metadata import PICKLE_DAMAGE
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


class _LayoutUnpickler(pickle.Unpickler):
    """Reads (offset, size, stride) out of a pickled tensor. It makes no tensor and runs nothing that it names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return lambda storage, offset, size, stride, *rest: (int(offset), tuple(size), tuple(stride))
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *rest: data
        if module == "torch" or (module, name) == ("collections", "OrderedDict"):
            return lambda *rest: None  # a dtype, a kind of storage, no hooks
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: object) -> None:
        return None


def parse_archive(archive: memoryview, shape: Shape, dtype: torch.dtype) -> tuple[int, tuple[int, Shape, Shape]]:
    """Return where the data begins in ``torch.save`` of a tensor that another torch made, and its layout there:
    (offset, size, stride), in elements.

    Raises ValueError when it is no such archive, or holds another shape.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as found:
            info = next(each for each in found.infolist() if each.filename.endswith("/data/0"))
            layout = _LayoutUnpickler(io.BytesIO(found.read(info.filename.removesuffix("data/0") + "data.pkl"))).load()
    except (StopIteration, *PICKLE_DAMAGE) as error:
        raise ValueError(f"not an archive of a tensor ({error})") from error
    header, count = info.header_offset, math.prod(shape) * dtype.itemsize
    names = int.from_bytes(archive[header + 26 : header + 28], "little")
    extra = int.from_bytes(archive[header + 28 : header + 30], "little")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != count:
        raise ValueError(f"{info.file_size} bytes of data instead of {count}")
    if not isinstance(layout, tuple) or layout[1] != shape:
        raise ValueError(f"not an archive of a tensor of shape {shape}")
    return header + 30 + names + extra, layout
