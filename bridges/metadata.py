"""The pickles of a ``torch_dist`` checkpoint: ``.metadata`` and the object ``common_state``.

A pickle can run code. They are read here through an unpickler that knows the few names they need and refuses all
others. Data of tensors is never unpickled: it is taken from the bytes that the metadata points at.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Collection
from typing import Any, BinaryIO

from torch.distributed.checkpoint.metadata import Metadata

from bridges.errors import BridgeError

_CHECKPOINT = "torch.distributed.checkpoint."
ALLOWED = {
    *((_CHECKPOINT + "metadata", name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    (_CHECKPOINT + "filesystem", "_StorageInfo"),
    *((_CHECKPOINT + "planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
    *(("torch", name) for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint8", "bool",
    )),
}  # fmt: skip


class AllowListUnpickler(pickle.Unpickler):
    """Loads nothing but the ``allowed`` (module, name) pairs. Raises ``pickle.UnpicklingError`` for all others."""

    def __init__(self, file: BinaryIO, allowed: Collection[tuple[str, str]] = ALLOWED) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


PICKLE_DAMAGE = (
    pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, IndexError, KeyError, OverflowError,
    MemoryError, zipfile.BadZipFile,
)  # fmt: skip


def parse_metadata(data: bytes, path: str) -> Metadata:
    """Return the metadata of a checkpoint from the content of its ``.metadata``; ``path`` names it in messages.

    Raises :class:`BridgeError` if it is damaged or asks for anything that a checkpoint does not need.
    """
    try:
        value = AllowListUnpickler(io.BytesIO(data)).load()
    except PICKLE_DAMAGE as error:
        raise BridgeError(
            f"{path} is damaged or not a checkpoint's: {error}: refused; save or import it again"
        ) from error
    if not isinstance(value, Metadata) or not isinstance(value.storage_data, dict):
        raise BridgeError(
            f"{path} does not hold the metadata of a torch_dist checkpoint: refused; save or import it again"
        )
    return value


def parse_common_state(data: bytes, path: str) -> dict[str, Any]:
    """Return the object ``common_state``, ``torch.save([dict])`` of plain values. Raises :class:`BridgeError`."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            value = AllowListUnpickler(io.BytesIO(archive.read(name)), {("collections", "OrderedDict")}).load()
    except (StopIteration, *PICKLE_DAMAGE) as error:
        raise BridgeError(f"{path}: common_state is not plain values ({error}): refused") from error
    if not (isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict)):
        raise BridgeError(f"{path}: common_state is not what Megatron writes: refused")
    return value[0]
