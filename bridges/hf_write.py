"""Writing a HF folder: the places of all tensors are fixed first, then filled in any order from several threads."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from bridges.errors import BridgeError
from bridges.hf_io import DTYPE_NAMES, INDEX, TensorInfo
from bridges.rows import Shape
from bridges.staging import byte_blocks, write_all, write_file

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Parse ``"5GB"``, ``"500MiB"`` or plain bytes into bytes."""
    number = text.strip().rstrip("BKMGIbkmgi")
    unit = text.strip()[len(number) :].upper() or "B"
    try:
        size = int(float(number) * UNITS[unit])
    except (KeyError, ValueError):
        raise BridgeError(f"a size of {text!r} is not understood; write e.g. 5GB or 500MB") from None
    if size <= 0:
        raise BridgeError(f"a size of {text!r} must be more than 0; write e.g. 5GB")
    return size


class HfWriter:
    """Fills a folder with safetensors files of at most ``max_shard_size`` bytes (a larger tensor stands alone).

    ``tensors``: name → (shape, dtype) in the order of the files. ``stem``: what their names begin with.
    :meth:`write` may be called in any order and from several threads; :meth:`finish` writes the index and syncs.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, tuple[Shape, torch.dtype]],
        max_shard_size: int = 5 * 10**9,
        stem: str = "model",
    ) -> None:
        self.folder = folder
        self.places: dict[str, TensorInfo] = {}
        self._descriptors: dict[str, int] = {}
        shards: list[list[str]] = [[]]
        filled = 0
        for name, (shape, dtype) in tensors.items():
            size = math.prod(shape) * dtype.itemsize
            if shards[-1] and filled + size > max_shard_size:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += size
        for number, names in enumerate(shards, 1):
            single = len(shards) == 1
            file = f"{stem}.safetensors" if single else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            self._create(file, names, tensors)

    def _create(self, file: str, names: Iterable[str], tensors: Mapping[str, tuple[Shape, torch.dtype]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets, position = {}, 0
        for name in names:
            shape, dtype = tensors[name]
            end = position + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
            offsets[name] = (position, end)
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data starts aligned, as the library writes it
        start = 8 + len(text)
        descriptor = os.open(self.folder / file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self._descriptors[file] = descriptor
        write_all(descriptor, memoryview(len(text).to_bytes(8, "little") + text), 0)
        os.ftruncate(descriptor, start + position)
        for name, (begin, end) in offsets.items():
            shape, dtype = tensors[name]
            self.places[name] = TensorInfo(file, dtype, shape, start + begin, start + end)

    def write(self, name: str, tensor: Tensor, index: int | None = None) -> int:
        """Write a tensor (or the slice ``[index]`` of it), cast to the declared dtype. Returns the bytes written."""
        place = self.places[name]
        expected = place.shape if index is None else place.shape[1:]
        assert tuple(tensor.shape) == expected, (name, tuple(tensor.shape), expected)
        size = math.prod(expected) * place.dtype.itemsize
        offset = place.start + (index or 0) * size
        for block in byte_blocks(tensor, place.dtype):
            offset = write_all(self._descriptors[place.file], block, offset)
        return size

    def finish(self) -> None:
        """Sync the files and write the index if there is more than one."""
        if len(self._descriptors) > 1:
            total = sum(place.nbytes for place in self.places.values())
            weight_map = {name: place.file for name, place in sorted(self.places.items())}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_file(self.folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(os.fsync, self._descriptors.values()))
        self.close()

    def close(self) -> None:
        """Close the files; safe to call twice."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
