"""Reading and writing the ``.metadata`` file of a ``torch_dist`` checkpoint.

The file is a pickle, and a pickle can run code. It is read here through an unpickler that knows the few names such a
file needs and refuses all others.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from pathlib import Path
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
        """See the class."""
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a checkpoint. Raises :class:`BridgeError` if it is missing, damaged or asks for anything that
    a checkpoint does not need."""
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            value = AllowListUnpickler(file).load()
    except OSError as error:
        raise BridgeError(f"{path}: {error.strerror}; save or import the checkpoint again") from error
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, IndexError, KeyError) as error:
        raise BridgeError(f"{path} is damaged or not a checkpoint's: {error}; save or import it again") from error
    if not isinstance(value, Metadata) or not isinstance(value.storage_data, dict):
        raise BridgeError(f"{path} does not hold the metadata of a torch_dist checkpoint; save or import it again")
    return value
