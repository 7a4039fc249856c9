"""Values as bytes and back, exactly.

Layout: uint32 length of the JSON text, the text, the arrays one after the other. The text is ``[arrays, tree]``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from array import array as Doubles
from typing import Any

import numpy as np

from skyrl_megatron.data.journal import Buffer
from skyrl_megatron.errors import DataError, JournalError

_LENGTH = struct.Struct("<I")
_PLAIN = frozenset((type(None), bool, int, float, str))
_SHORT = 8
"""Shorter lists of numbers are stored in the JSON text."""


class Codec:
    """Encodes trees of None, bool, int, float, str, list, tuple, dict, numpy arrays and the given dataclasses."""

    def __init__(self, *classes: type) -> None:
        self._classes = {kind.__name__: kind for kind in classes}
        self._fields = {kind: [field.name for field in dataclasses.fields(kind)] for kind in classes}

    def encode(self, value: Any) -> list[Buffer]:
        """Return the bytes in parts, without copying arrays. Raises DataError for a value of another type."""
        arrays: list[tuple[list[Any], Buffer]] = []
        tree = self._tree(value, arrays, "")
        text = json.dumps([[about for about, _ in arrays], tree], separators=(",", ":")).encode()
        return [_LENGTH.pack(len(text)), text, *(data for _, data in arrays)]

    def decode(self, data: Buffer) -> Any:
        """Return the value. Raises JournalError if another version of the package recorded it."""
        (length,) = _LENGTH.unpack_from(data)
        at = _LENGTH.size + length
        about, tree = json.loads(bytes(data[_LENGTH.size : at]))
        arrays: list[np.ndarray] = []
        for dtype, shape, packed in about:
            array, at = _array(data, at, np.dtype(dtype), shape, packed)
            arrays.append(array)
        try:
            return self._value(tree, arrays)
        except (TypeError, LookupError) as error:
            raise JournalError(
                f"a record does not fit this version of skyrl-megatron: {error}; resume with the version that wrote it"
            ) from error

    def _tree(self, value: Any, arrays: list[tuple[list[Any], Buffer]], path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        # what acts as an array is one elsewhere (``types.StoredArray``, which needs torch), and is fetched here
        if kind is np.ndarray or isinstance(value, np.lib.mixins.NDArrayOperatorsMixin):
            return ["a", _add(np.asarray(value), arrays, path)]
        if kind is list:
            if packed := _numbers(value, arrays) or _column(value, arrays, path):
                return packed
            if _PLAIN.issuperset(map(type, value)):
                return ["l", *value]
            return ["l", *(self._tree(item, arrays, f"{path}[{i}]") for i, item in enumerate(value))]
        if kind is tuple:
            if _PLAIN.issuperset(map(type, value)):
                return ["t", *value]
            return ["t", *(self._tree(item, arrays, path) for item in value)]
        if kind is dict:
            if all(type(key) is str for key in value):
                return {key: self._tree(item, arrays, f"{path}.{key}") for key, item in value.items()}
            pairs = ((self._tree(k, arrays, path), self._tree(v, arrays, path)) for k, v in value.items())
            return ["d", *pairs]
        if kind in self._fields:
            values = ((name, getattr(value, name)) for name in self._fields[kind])
            return [kind.__name__, {name: self._tree(item, arrays, f"{path}.{name}") for name, item in values}]
        if isinstance(value, np.generic):
            return ["s", _add(np.asarray(value), arrays, path)]
        raise DataError(
            f"{path.lstrip('.') or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which cannot be recorded:"
            " return numbers, text, lists, dicts or numpy arrays"
        )

    def _value(self, tree: Any, arrays: list[np.ndarray]) -> Any:
        if isinstance(tree, dict):
            return {key: self._value(item, arrays) for key, item in tree.items()}
        if not isinstance(tree, list):
            return tree
        tag, *rest = tree
        if tag == "l":
            return [self._value(item, arrays) for item in rest]
        if tag == "t":
            return tuple(self._value(item, arrays) for item in rest)
        if tag == "d":
            return {self._value(key, arrays): self._value(item, arrays) for key, item in rest}
        if tag == "a":
            return arrays[rest[0]]
        if tag == "c":
            return [part.copy() for part in np.split(arrays[rest[0]], np.cumsum(rest[1])[:-1])]
        if tag == "s":
            return arrays[rest[0]][()]
        if tag in ("i", "f"):
            return arrays[rest[0]].tolist()
        if tag == "z":
            length, positions, values = rest
            numbers = [0.0] * length
            for position, number in zip(positions, values, strict=True):
                numbers[position] = number
            return numbers
        return self._classes[tag](**self._value(rest[0], arrays))


def _add(array: np.ndarray, arrays: list[tuple[list[Any], Buffer]], path: str) -> int:
    """Add an array to ``arrays``, and return its index."""
    if array.dtype.hasobject or array.dtype.names:
        raise DataError(
            f"{path.lstrip('.')} is an array of {array.dtype}, which cannot be recorded: return an array of numbers"
        )
    flat = array.reshape(-1)  # a copy where it is not contiguous
    packed = array.dtype.itemsize == 1 and array.dtype.kind in "ub" and flat.size > 64 and bool(flat.max() <= 1)
    data = np.packbits(flat) if packed else flat.view(np.uint8)
    arrays.append(([array.dtype.str, array.shape, int(packed)], data.data if data.size else b""))
    return len(arrays) - 1


def _array(data: Buffer, at: int, dtype: np.dtype, shape: list[int], packed: int) -> tuple[np.ndarray, int]:
    """Return (a writable array, where the next one begins)."""
    size = math.prod(shape)
    if packed:
        nbytes = (size + 7) // 8
        flat = np.unpackbits(np.frombuffer(data, np.uint8, nbytes, at), count=size).view(dtype)
    else:
        nbytes = size * dtype.itemsize
        flat = np.frombuffer(data, np.uint8, nbytes, at).copy().view(dtype) if nbytes else np.zeros(size, dtype)
    return flat.reshape(shape), at + nbytes


def _numbers(values: list[Any], arrays: list[tuple[list[Any], Buffer]]) -> list[Any] | None:
    """Return the tree of a list of integers or of floats; None for mixed, other or short lists."""
    if len(values) < _SHORT:
        return None
    kinds = set(map(type, values))
    if kinds == {float}:
        array = np.frombuffer(Doubles("d", values))  # several times as fast as np.asarray
        positions = np.flatnonzero(array.view(np.int64))  # of values other than 0.0; -0.0 counts as other
        if 4 * len(positions) < len(values):
            return ["z", len(values), positions.tolist(), array[positions].tolist()]
        return ["f", _add(array, arrays, "")]
    if kinds == {int}:
        least, most = min(values), max(values)
        if -(2**63) <= least and most < 2**63:
            far = min(least, -most - 1) if least < 0 else most  # the narrowest type that holds it holds all
            return ["i", _add(np.asarray(values, np.min_scalar_type(far)), arrays, "")]
    return None


def _column(values: list[Any], arrays: list[tuple[list[Any], Buffer]], path: str) -> list[Any] | None:
    """Return the tree of a list of arrays that differ only in length; None for other lists."""
    if len(values) < 2 or not all(type(value) is np.ndarray and value.ndim for value in values):
        return None
    first = values[0]
    if any(value.dtype != first.dtype or value.shape[1:] != first.shape[1:] for value in values):
        return None
    return ["c", _add(np.concatenate(values), arrays, path), [len(value) for value in values]]
