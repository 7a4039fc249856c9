"""Read the pickles of a ``torch_dist`` checkpoint without running code.

A pickle can run code. Even with an allow-list of names, ``pickle.Unpickler`` allocates the sizes that a pickle
declares, hashes any tuple, and sets attributes of any object. :func:`load` interprets only the opcodes that
``pickle.dumps`` and ``torch.save`` write for data (protocols 2 to 5, ``pickletools`` of CPython), and calls only the
functions that it is given. Its time and memory are proportional to the length of the pickle: every size is compared
with the remaining bytes, and keys of dicts are strings, small integers or records. Anything that is not metadata is
rejected. Tensor data is never unpickled; it is read from the bytes that the metadata points to.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

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

_MOST_DIGITS = 8  # bytes of an integer: sizes and counts have 64 bits
_INT, _FLOAT = struct.Struct("<i"), struct.Struct(">d")
_SMALL_KEY = 2**31


class PickleError(ValueError):
    """A pickle that is damaged, or holds a value of an unsupported type."""


@dataclass(frozen=True, slots=True)
class Call:
    """A name that a pickle may call: ``function`` gets the pickle's arguments."""

    function: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A class that a pickle may name. Its objects become :class:`Record`, and no code of the class runs."""

    name: str


@dataclass(eq=False, slots=True)
class Record:
    """An object of a class, as the pickle describes it."""

    kind: Kind
    state: Any = None


_MARK: Final = object()


def load(data: bytes, names: Mapping[tuple[str, str], Any], persistent: bool = False) -> Any:
    """Return the value of a pickle.

    ``names``: (module, name) → :class:`Call`, :class:`Kind`, or a value. ``persistent``: read the storage references
    of ``torch.save`` as None. Raises :class:`PickleError`.
    """
    try:
        return _Reader(data, names, persistent).run()
    except (IndexError, struct.error) as error:
        raise PickleError("it is cut off") from error
    except UnicodeDecodeError as error:
        raise PickleError("it holds text that is not UTF-8") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise PickleError(f"its parts do not fit one another ({type(error).__name__}: {error!s:.80})") from error


class _Reader:
    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any], persistent: bool) -> None:
        self._data, self._names, self._persistent = data, names, persistent
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, stack, memo, others = self._data, self._stack, self._memo, _OPCODES
        while True:
            code = data[self._at]
            self._at += 1
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x68:  # BINGET
                stack.append(memo[data[self._at]])
                self._at += 1
            elif code == 0x6A:  # LONG_BINGET
                at = self._at
                stack.append(memo[data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24])
                self._at = at + 4
            elif code == 0x4B:  # BININT1
                stack.append(data[self._at])
                self._at += 1
            elif code == 0x28:  # MARK
                stack.append(_MARK)
            elif code == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code == 0x86:  # TUPLE2
                stack[-2:] = [(stack[-2], stack[-1])]
            elif code == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif code == 0x2E:  # STOP
                if len(stack) != 1 or stack[0] is _MARK:
                    raise PickleError("it ends before its value is complete")
                return stack[0]
            else:
                step = others.get(code)
                if step is None:
                    raise PickleError(f"it has the unsupported opcode {code:#04x}")
                step(self)

    # ---------------------------------------------------------------------------------- bytes
    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise PickleError(f"it declares {count} bytes and has {len(self._data) - self._at}")
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, width: int) -> int:
        return int.from_bytes(self._bytes(width), "little")

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise PickleError("it is cut off")
        line = self._data[self._at : end].decode()
        self._at = end + 1
        return line

    def _text(self, width: int) -> None:
        self._stack.append(self._bytes(self._number(width)).decode("utf-8", "surrogatepass"))

    def _long(self) -> None:
        if (count := self._number(1)) > _MOST_DIGITS + 1:
            raise PickleError(f"it holds an integer of {count} bytes")
        self._stack.append(int.from_bytes(self._bytes(count), "little", signed=True))

    # ---------------------------------------------------------------------------------- values
    def _since_mark(self) -> list[Any]:
        stack, at = self._stack, len(self._stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise PickleError("its parts do not fit one another (no mark)")
        found = stack[at + 1 :]
        del stack[at:]
        return found

    def _name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise PickleError("it asks for a name that is not a string")
        if (module, name) not in self._names:
            raise PickleError(f"it asks for {module:.80}.{name:.80}")
        self._stack.append(self._names[module, name])

    def _stack_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._name(module, name)

    def _call(self) -> None:
        arguments, what = self._stack.pop(), self._stack.pop()
        if not isinstance(arguments, tuple) or not isinstance(what, Call | Kind):
            raise PickleError("it calls an object that is not a function")
        self._stack.append(Record(what, arguments) if isinstance(what, Kind) else what.function(*arguments))

    def _new(self) -> None:
        _, kind = self._stack.pop(), self._stack.pop()
        if not isinstance(kind, Kind):
            raise PickleError("it creates an object of something that is not a class")
        self._stack.append(Record(kind))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, Record):
            raise PickleError("it sets the state of a value that has none")
        target.state = state

    def _append(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise PickleError("it appends to a value that is not a list")
        self._stack[-1].extend(values)

    def _set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise PickleError("it sets keys of a value that is not a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) is not str and not _can_be_key(key):
                raise PickleError(f"it has a {type(key).__name__} as a key")
            target[key] = value

    def _last(self, count: int) -> list[Any]:
        return [self._stack.pop() for _ in range(count)][::-1]  # a mark among them is rejected by later checks

    def _refer(self) -> None:
        if not self._persistent:
            raise PickleError("it refers to a storage")
        self._stack.pop()
        self._stack.append(None)

    def _put(self, width: int) -> None:
        self._memo[self._number(width)] = self._stack[-1]


def _can_be_key(key: Any) -> bool:
    """Return whether the hash of a value is cheap and hash collisions are hard to construct."""
    return isinstance(key, str | Record) or (type(key) is int and abs(key) < _SMALL_KEY)


_OPCODES: Final[dict[int, Callable[[_Reader], Any]]] = {
    0x80: lambda r: r._bytes(1),  # PROTO
    0x95: lambda r: r._bytes(8),  # FRAME: a hint for readers of files
    0x4E: lambda r: r._stack.append(None),  # NONE
    0x88: lambda r: r._stack.append(True),  # NEWTRUE
    0x89: lambda r: r._stack.append(False),  # NEWFALSE
    0x4A: lambda r: r._stack.append(_INT.unpack(r._bytes(4))[0]),  # BININT
    0x4D: lambda r: r._stack.append(r._number(2)),  # BININT2
    0x8A: _Reader._long,  # LONG1
    0x47: lambda r: r._stack.append(_FLOAT.unpack(r._bytes(8))[0]),  # BINFLOAT
    0x8C: lambda r: r._text(1),  # SHORT_BINUNICODE
    0x58: lambda r: r._text(4),  # BINUNICODE
    0x8D: lambda r: r._text(8),  # BINUNICODE8
    0x43: lambda r: r._stack.append(r._bytes(r._number(1))),  # SHORT_BINBYTES
    0x42: lambda r: r._stack.append(r._bytes(r._number(4))),  # BINBYTES
    0x8E: lambda r: r._stack.append(r._bytes(r._number(8))),  # BINBYTES8
    0x5D: lambda r: r._stack.append([]),  # EMPTY_LIST
    0x61: lambda r: r._append(r._last(1)),  # APPEND
    0x65: lambda r: r._append(r._since_mark()),  # APPENDS
    0x87: lambda r: r._stack.append(tuple(r._last(3))),  # TUPLE3
    0x74: lambda r: r._stack.append(tuple(r._since_mark())),  # TUPLE
    0x73: lambda r: r._set(r._last(2)),  # SETITEM
    0x75: lambda r: r._set(r._since_mark()),  # SETITEMS
    0x71: lambda r: r._put(1),  # BINPUT
    0x72: lambda r: r._put(4),  # LONG_BINPUT
    0x63: lambda r: r._name(r._line(), r._line()),  # GLOBAL
    0x93: _Reader._stack_name,  # STACK_GLOBAL
    0x52: _Reader._call,  # REDUCE
    0x81: _Reader._new,  # NEWOBJ
    0x62: _Reader._build,  # BUILD
    0x51: _Reader._refer,  # BINPERSID
}


_CHECKPOINT = "torch.distributed.checkpoint."
_MOST = 2**63 - 1  # maximum of a size, an offset or a number of elements
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip


def _plain_dict(*pairs: Any) -> dict[Any, Any]:
    if pairs:
        raise PickleError("it creates an OrderedDict with values")
    return {}


def _joined(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise PickleError("it has a path that is not a string")
    return "/".join(parts)


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple:
        raise PickleError("it has a shape that is not a tuple of sizes")
    for each in values:
        if type(each) is not int or not 0 <= each <= _MOST:
            raise PickleError("it has a shape that is not a tuple of sizes")
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
    """Return the metadata of a checkpoint from the content of its ``.metadata``: tensors and storage of their chunks.

    ``path``: for messages. Raises :class:`BridgeError` if the content is damaged or is not plain checkpoint metadata.
    """
    try:
        state = load(data, _NAMES)
    except PickleError as error:
        raise BridgeError(
            f"{path} is damaged or not a checkpoint's: {error}: refused; save or import it again"
        ) from error
    try:
        fields = _state(state, "Metadata")
        tensors = {_text(key): _stored(value) for key, value in _dict(fields, "state_dict_metadata").items()}
        pairs = (_location(*item, tensors) for item in _dict(fields, "storage_data").items())
        locations = dict(location for location in pairs if location is not None)
    except PickleError as error:
        raise BridgeError(
            f"{path} does not hold the metadata of a torch_dist checkpoint ({error}): refused; save or import it again"
        ) from error
    return Metadata(tensors, storage_data=locations)


def _state(value: Any, kind: str) -> dict[Any, Any]:
    """Return the fields of an object. Raises :class:`PickleError` unless it is of ``kind``."""
    if not isinstance(value, Record) or value.kind.name != kind or not isinstance(value.state, dict | None):
        raise PickleError(f"it has {_named(value)} where a {kind} is expected")
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
        raise PickleError(f"it has {_named(value)} where a name is expected")
    return value


def _stored(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not (isinstance(value, Record) and value.kind.name == "TensorStorageMetadata"):
        return BytesStorageMetadata()
    fields = _state(value, "TensorStorageMetadata")
    shape, chunks = _sizes(fields.get("size")), fields.get("chunks")
    if math.prod(size for size in shape if size) > _MOST:
        raise PickleError(f"it has a tensor of shape {list(shape)}")
    if not isinstance(chunks, list):
        raise PickleError(f"it has {_named(chunks)} where a list of chunks is expected")
    parsed = [_chunk(_state(chunk, "ChunkStorageMetadata"), shape) for chunk in chunks]
    if len({chunk.offsets for chunk in parsed}) != len(parsed):
        raise PickleError("it has a chunk twice")
    return TensorStorageMetadata(TensorProperties(dtype=_dtype(fields.get("properties"))), torch.Size(shape), parsed)


def _dtype(properties: Any) -> torch.dtype:
    state = properties.state if isinstance(properties, Record) and properties.kind.name == "TensorProperties" else None
    dtype = state.get("dtype") if isinstance(state, dict) else next(iter(state), None) if state else None
    if not isinstance(dtype, torch.dtype):
        raise PickleError(f"it has {_named(dtype)} where a dtype is expected")
    return dtype


def _chunk(fields: dict[Any, Any], shape: tuple[int, ...]) -> ChunkStorageMetadata:
    offsets, sizes = _sizes(fields.get("offsets")), _sizes(fields.get("sizes"))
    if not len(offsets) == len(sizes) == len(shape) or any(
        offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    ):
        raise PickleError(f"it has a chunk of sizes {list(sizes)} at {list(offsets)} of a tensor of {list(shape)}")
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _location(index: Any, info: Any, tensors: dict[str, Any]) -> tuple[MetadataIndex, _StorageInfo] | None:
    """Return the storage location of a chunk or an object; None if its tensor is not listed."""
    fields, storage = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
    name, offset = _text(fields.get("fqn")), fields.get("offset")
    stored = tensors.get(name)
    if isinstance(stored, TensorStorageMetadata) and offset is not None:
        offset = torch.Size(_sizes(offset))
        if len(offset) != len(stored.size) or any(map(int.__gt__, offset, stored.size)):
            raise PickleError(f"it has a chunk of {name:.80} at {list(offset)}")
    elif offset is not None:
        return None
    start, length = _sizes((storage.get("offset"), storage.get("length")))
    return MetadataIndex(name, offset), _StorageInfo(_text(storage.get("relative_path")), start, length)


_ZIP_DAMAGE = (
    zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, KeyError, EOFError, OverflowError, struct.error,
)  # fmt: skip
"""Exceptions of ``zipfile`` for damaged or unsupported archives."""


def zipped(data: bytes | memoryview, ending: str) -> tuple[zipfile.ZipInfo, bytes]:
    """Return the entry of a ``torch.save`` archive with this name ending, and the pickle next to it.

    ``torch.save`` does not compress, so an entry that is longer than the archive is rejected. Raises ValueError.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            info = next((member for member in archive.infolist() if member.filename.endswith(ending)), None)
            if info is None:
                raise ValueError(f"it has no {ending}")
            pickled = archive.getinfo(info.filename.removesuffix(ending) + "/data.pkl")
            for member in (info, pickled):
                if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or member.file_size > len(data):
                    raise ValueError(f"{member.filename:.80} is compressed, encrypted or longer than the archive")
            return info, archive.read(pickled)
    except _ZIP_DAMAGE as error:
        raise ValueError(f"it is not a complete archive: {error!s:.120}") from error


def parse_common_state(data: bytes, path: str) -> dict[str, Any]:
    """Return the object ``common_state``, a ``torch.save([dict])`` of plain values. Raises :class:`BridgeError`."""
    try:
        value = load(zipped(data, "/data.pkl")[1], _PLAIN)
    except ValueError as error:
        raise BridgeError(
            f"{path}: common_state is not plain values ({error}): refused; save or import the checkpoint again"
        ) from error
    if not (isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict)):
        raise BridgeError(
            f"{path}: common_state does not have Megatron's format: refused; save or import the checkpoint again"
        )
    return value[0]
