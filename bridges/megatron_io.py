"""Distributed checkpoints of Megatron in local folders, read and written chunk by chunk.

No model is built, no process group exists and Megatron is not imported (see :mod:`bridges.torch_dist` for the format).
What is written here has whole layers and experts as chunks, gate and up apart, so that any tp/pp/vpp/ep/etp can be
loaded by reading parts of them.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from bridges.errors import BridgeError
from bridges.files import open_regular, refuse_outside
from bridges.hf_io import map_file
from bridges.metadata import parse_metadata
from bridges.rows import Shape
from bridges.staging import write_file
from bridges.torch_dist import (
    COMMON_STATE,
    FORMAT,
    Chunk,
    ChunkFile,
    build_metadata,
    overlap,
    slices,
    stored_tensors,
    tensor_in,
)


class DistCheckpoint:
    """A ``torch_dist`` folder opened for reading: ``tensors`` by key, data as views of mapped files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._check_format()
        metadata = self.path / ".metadata"
        try:
            with open_regular(metadata) as file:
                content = file.read()
        except OSError as error:
            raise BridgeError(f"{metadata}: {error.strerror}; save or import the checkpoint again") from error
        self.tensors = stored_tensors(parse_metadata(content, str(metadata)), str(path), self._file_bytes)
        self._maps: dict[str, memoryview] = {}

    def _check_format(self) -> None:
        path = self.path / "metadata.json"
        if not path.exists():
            raise BridgeError(
                f"{self.path} has no metadata.json: not a Megatron distributed checkpoint, or one whose save was "
                "interrupted; give the folder that holds metadata.json and *.distcp files"
            )
        try:
            with open_regular(path) as file:
                found = json.loads(file.read())
        except (OSError, ValueError, RecursionError) as error:
            raise BridgeError(f"{path} is damaged ({error}); save or import the checkpoint again") from error
        for key, expected in FORMAT.items():
            if not isinstance(found, dict) or found.get(key) != expected:
                got = found.get(key) if isinstance(found, dict) else found
                raise BridgeError(
                    f"{path}: {key}={got!r}, only {expected!r} can be read; load the checkpoint with the Megatron "
                    "that wrote it and save it with --ckpt-format torch_dist"
                )

    def _file_bytes(self, name: str, key: str) -> int:
        """Return the size of a data file. Raises :class:`BridgeError` if it is outside of the folder or missing."""
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise BridgeError(f"{self.path}/.metadata names {name!r}, which is outside the folder; fetch it again")
        if not (self.path / name).is_file():
            raise BridgeError(f"{self.path / name} (for {key}) is missing; fetch that file again")
        refuse_outside(self.path / name, self.path)
        return (self.path / name).stat().st_size

    def read(self, key: str, offsets: Shape, shape: Shape, lead: int = 0) -> Tensor:
        """Return the block of ``shape`` at ``offsets``; a view of the file where one chunk is exactly that block.

        ``lead``: number of leading axes on which the block has length 1, which are dropped from the result.
        """
        stored = self.tensors[key]
        chunks = stored.meeting(offsets, shape)
        if len(chunks) == 1 and (chunks[0].offsets, chunks[0].sizes) == (offsets, shape):
            return self._load(chunks[0], stored.dtype).reshape(shape[lead:])
        common = [(chunk, overlap(chunk.offsets, chunk.sizes, offsets, shape)) for chunk in chunks]
        if sum(math.prod(shared[1]) for _, shared in common if shared) != math.prod(shape):
            raise BridgeError(f"{self.path}: {key} is stored incompletely at {offsets}; save the checkpoint again")
        block = torch.empty(shape, dtype=stored.dtype)
        for chunk, shared in common:
            assert shared is not None
            block[slices(*shared, offsets)] = self._load(chunk, stored.dtype)[slices(*shared, chunk.offsets)]
        return block.reshape(shape[lead:])

    def _load(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        if chunk.file not in self._maps:
            self._maps[chunk.file] = memoryview(map_file(self.path / chunk.file))
        archive = self._maps[chunk.file][chunk.start : chunk.start + chunk.length]
        return tensor_in(archive, chunk, dtype, str(self.path))


def write_metadata(
    folder: Path, tensors: Mapping[str, tuple[Shape, torch.dtype]], files: list[ChunkFile], common: Mapping[str, Any]
) -> None:
    """Write ``common_state``, ``.metadata`` and, last, ``metadata.json``.

    ``tensors``: key → (global shape, dtype). ``files``: everything written, still open.
    """
    files[0].append_object(COMMON_STATE, dict(common))
    for file in files:
        file.finish()
    metadata = build_metadata(tensors, (each for file in files for each in file.written))
    write_file(folder / ".metadata", pickle.dumps(metadata))
    write_file(folder / "metadata.json", json.dumps(FORMAT).encode())
