"""The pickles of a ``torch_dist`` checkpoint: ``.metadata`` and the object ``common_state``.

A pickle can run code. These are read by :mod:`bridges.pickles`, which runs none, and what is not metadata is refused.
Data of tensors is never unpickled: it is taken from the bytes that the metadata points at.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bridges.errors import BridgeError
from bridges.pickles import Call, Kind, PickleError, Record, load

_CHECKPOINT = "torch.distributed.checkpoint."
_MOST = 2**63 - 1  # of a size, a place or a number of elements
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip


def _plain_dict(*pairs: Any) -> dict[Any, Any]:
    if pairs:
        raise PickleError("it makes an OrderedDict of values")
    return {}


def _joined(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise PickleError("it has a path that is no text")
    return "/".join(parts)


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple:
        raise PickleError("it has a shape that is no tuple of sizes")
    for each in values:
        if type(each) is not int or not 0 <= each <= _MOST:
            raise PickleError("it has a shape that is no tuple of sizes")
    return values


_PLAIN = {("collections", "OrderedDict"): Call(_plain_dict)}
_NAMES: dict[tuple[str, str], Any] = {
    **_PLAIN,
    **{(_CHECKPOINT + "metadata", name): Kind(name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    )},
    (_CHECKPOINT + "filesystem", "_StorageInfo"): Kind("_StorageInfo"),
    **{(_CHECKPOINT + "planner", name): Kind(name)
       for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")},
    ("torch", "Size"): Call(_sizes),
    ("torch.serialization", "_get_layout"): Call(lambda name: None),
    ("pathlib", "PosixPath"): Call(_joined),
    ("pathlib._local", "PosixPath"): Call(_joined),
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
}  # fmt: skip


def parse_metadata(data: bytes, path: str) -> Metadata:
    """Return the metadata of a checkpoint from the content of its ``.metadata``; ``path`` names it in messages. Of its
    fields those that say which tensors there are and where their chunks are.

    Raises :class:`BridgeError` if it is damaged or asks for anything that a checkpoint does not need.
    """
    try:
        whole = load(data, _NAMES)
    except PickleError as error:
        raise BridgeError(
            f"{path} is damaged or not a checkpoint's: {error}: refused; save or import it again"
        ) from error
    try:
        fields = _state(whole, "Metadata")
        tensors = {_text(key): _stored(value) for key, value in _dict(fields, "state_dict_metadata").items()}
        found = (_place(*each, tensors) for each in _dict(fields, "storage_data").items())
        places = dict(place for place in found if place is not None)
    except PickleError as error:
        raise BridgeError(
            f"{path} does not hold the metadata of a torch_dist checkpoint ({error}): refused; save or import it again"
        ) from error
    return Metadata(tensors, storage_data=places)


def _state(value: Any, kind: str) -> dict[Any, Any]:
    """Return the fields of an object. Raises :class:`PickleError` unless it is of ``kind``."""
    if not isinstance(value, Record) or value.kind.name != kind or not isinstance(value.state, dict | None):
        raise PickleError(f"it has {_named(value)} in the place of a {kind}")
    return value.state or {}


def _named(value: Any) -> str:
    return value.kind.name if isinstance(value, Record) else f"a {type(value).__name__}"


def _dict(fields: dict[Any, Any], name: str) -> dict[Any, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise PickleError(f"its {name} is {_named(value)}, not a dict")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise PickleError(f"it has {_named(value)} in the place of a name")
    return value


def _stored(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not (isinstance(value, Record) and value.kind.name == "TensorStorageMetadata"):
        return BytesStorageMetadata()
    fields = _state(value, "TensorStorageMetadata")
    shape, chunks = _sizes(fields.get("size")), fields.get("chunks")
    if math.prod(size for size in shape if size) > _MOST:
        raise PickleError(f"it has a tensor of shape {list(shape)}")
    if not isinstance(chunks, list):
        raise PickleError(f"it has {_named(chunks)} in the place of a list of chunks")
    found = [_chunk(_state(chunk, "ChunkStorageMetadata"), shape) for chunk in chunks]
    if len({chunk.offsets for chunk in found}) != len(found):
        raise PickleError("it has a chunk twice")
    return TensorStorageMetadata(TensorProperties(dtype=_dtype(fields.get("properties"))), torch.Size(shape), found)


def _dtype(properties: Any) -> torch.dtype:
    state = properties.state if isinstance(properties, Record) and properties.kind.name == "TensorProperties" else None
    dtype = state.get("dtype") if isinstance(state, dict) else next(iter(state), None) if state else None
    if not isinstance(dtype, torch.dtype):
        raise PickleError(f"it has {_named(dtype)} in the place of a dtype")
    return dtype


def _chunk(fields: dict[Any, Any], shape: tuple[int, ...]) -> ChunkStorageMetadata:
    offsets, sizes = _sizes(fields.get("offsets")), _sizes(fields.get("sizes"))
    if not len(offsets) == len(sizes) == len(shape) or any(
        offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    ):
        raise PickleError(f"it has a chunk of sizes {list(sizes)} at {list(offsets)} of a tensor of {list(shape)}")
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _place(index: Any, info: Any, tensors: dict[str, Any]) -> tuple[MetadataIndex, _StorageInfo] | None:
    """Return where a chunk or an object is; None for one of a tensor that is not listed."""
    fields, place = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
    name, offset = _text(fields.get("fqn")), fields.get("offset")
    stored = tensors.get(name)
    if isinstance(stored, TensorStorageMetadata) and offset is not None:
        offset = torch.Size(_sizes(offset))
        if len(offset) != len(stored.size) or any(map(int.__gt__, offset, stored.size)):
            raise PickleError(f"it has a place of {name:.80} at {list(offset)}")
    elif offset is not None:
        return None
    start, length = _sizes((place.get("offset"), place.get("length")))
    return MetadataIndex(name, offset), _StorageInfo(_text(place.get("relative_path")), start, length)


_ZIP_DAMAGE = (
    zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, KeyError, EOFError, OverflowError, struct.error,
)  # fmt: skip
"""What ``zipfile`` raises for archives that are damaged, or have more in them than it reads."""


def zipped(data: bytes | memoryview, ending: str) -> tuple[zipfile.ZipInfo, bytes]:
    """Return an entry of a ``torch.save`` archive whose name ends so, and the pickle beside it.

    ``torch.save`` compresses nothing, so that no entry is longer than the archive. Raises ValueError.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            info = next((each for each in archive.infolist() if each.filename.endswith(ending)), None)
            if info is None:
                raise ValueError(f"it has no {ending}")
            pickled = archive.getinfo(info.filename.removesuffix(ending) + "/data.pkl")
            for each in (info, pickled):
                if each.compress_type != zipfile.ZIP_STORED or each.flag_bits & 1 or each.file_size > len(data):
                    raise ValueError(f"{each.filename:.80} is compressed, encrypted or longer than the archive")
            return info, archive.read(pickled)
    except _ZIP_DAMAGE as error:
        raise ValueError(f"it is no whole archive: {error!s:.120}") from error


def parse_common_state(data: bytes, path: str) -> dict[str, Any]:
    """Return the object ``common_state``, ``torch.save([dict])`` of plain values. Raises :class:`BridgeError`."""
    try:
        value = load(zipped(data, "/data.pkl")[1], _PLAIN)
    except ValueError as error:
        raise BridgeError(f"{path}: common_state is not plain values ({error}): refused") from error
    if not (isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict)):
        raise BridgeError(f"{path}: common_state is not what Megatron writes: refused")
    return value[0]
