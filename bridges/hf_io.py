"""Read tensors of HF folders as views of memory-mapped files, and write them in any order from several threads.

A safetensors file is an 8-byte length, a JSON header and the data (https://github.com/huggingface/safetensors). The
header is parsed here instead of by the library, because conversion needs the byte ranges, to check the length of a
file and to copy data directly.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from bridges.disk_form import AS_TEXT, DiskForm, TensorInfo
from bridges.errors import BridgeError
from bridges.files import check_folder, open_regular, read_hf_config, read_json, refuse_outside
from bridges.rows import Shape
from bridges.staging import byte_blocks, write_all, write_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 * 2**20  # the library's own limit


def read_header(folder: Path, file_name: str) -> dict[str, TensorInfo]:
    """Return name → :class:`TensorInfo` of a safetensors file. Raises :class:`BridgeError` if it is damaged."""
    path = folder / file_name

    def broken(what: str) -> BridgeError:
        return BridgeError(f"{path} is damaged: {what}; fetch the file again")

    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise broken(f"it has {size} bytes, its header should have {length}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise BridgeError(f"{path}: {error.strerror}; fetch the file again") from error
    except (ValueError, RecursionError) as error:
        raise broken(f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise broken("its header is not a JSON object")
    data = 8 + length
    infos = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = DTYPES[value["dtype"]], tuple(value["shape"])
            start, end = value["data_offsets"]
            are_sizes = all(type(number) is int and number >= 0 for number in (*shape, start, end))
            fits = are_sizes and start <= end and end - start == math.prod(shape) * dtype.itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise broken(f"tensor {name} has the entry {value!r}") from error
        if not fits:
            raise broken(f"tensor {name} of shape {list(shape)} occupies bytes {start} to {end}")
        if data + end > size:
            raise broken(f"tensor {name} ends at byte {data + end}, the file has {size}")
        infos[name] = TensorInfo(file_name, dtype, shape, data + start, data + end)
    return infos


class HfFolder:
    """A HF folder opened for reading.

    ``tensors``: name → :class:`TensorInfo`. ``form``: how they are named on disk. The constructor reads config, index
    and headers, and maps the data later. It raises :class:`BridgeError`, with file, tensor and fix, for anything
    missing, damaged or unsafe.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise BridgeError(
                f"{self.path} is not a folder; give the folder that holds config.json (of a model on the hub: the one "
                "that 'hf download NAME' prints)"
            )
        check_folder(self.path)
        self.config = read_hf_config(self.path)
        stored = self._read_tensors()
        self.form = DiskForm.of(self.config, stored)
        self.tensors: Mapping[str, TensorInfo] = self.form.own(stored, str(self.path))
        self._maps: dict[str, mmap.mmap] = {}

    def _read_tensors(self) -> dict[str, TensorInfo]:
        if (self.path / INDEX).exists():
            return self._read_index()
        single = self.path / "model.safetensors"
        files = [single] if single.exists() else sorted(self.path.glob("*.safetensors"))
        if not files:
            self._refuse_without_weights()
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in read_header(self.path, file.name).items():
                if name in tensors:
                    raise BridgeError(
                        f"{self.path}: {name} is both in {tensors[name].file} and in {file.name}: remove the file "
                        "that does not belong to the model"
                    )
                tensors[name] = info
        return tensors

    def _refuse_without_weights(self) -> None:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in self.path.glob(pattern))
        if pickles:
            raise BridgeError(
                f"{self.path} holds its weights as pickles ({pickles[0]}), which can run code when they are opened; "
                "save the model again with safe_serialization=True, or fetch its safetensors revision"
            )
        raise BridgeError(f"{self.path} holds no *.safetensors file; fetch the weights")

    def _read_index(self) -> dict[str, TensorInfo]:
        index = self.path / INDEX
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise BridgeError(f"{index} has no weight_map of names to files; fetch the file again")
        headers: dict[str, dict[str, TensorInfo]] = {}
        for file in sorted(set(weight_map.values())):
            pure = PurePosixPath(file)
            if pure.is_absolute() or ".." in pure.parts or "\\" in file:
                raise BridgeError(f"{index} names {file!r:.200}, which is outside the folder; fetch the file again")
            if not os.path.exists(self.path / file):  # also False for an invalid file name
                tensor = next(name for name, value in weight_map.items() if value == file)
                raise BridgeError(f"{index} names {file:.200} (for {tensor:.200}), which is missing; fetch that file")
            refuse_outside(self.path / file, self.path)
            headers[file] = read_header(self.path, file)
        for file, infos in headers.items():
            for name in infos:
                if weight_map.get(name) != file:
                    raise BridgeError(f"{self.path / file} holds {name}, which {index.name} places in "
                                      f"{weight_map.get(name, 'no file')}; fetch the folder again")  # fmt: skip
        for name, file in weight_map.items():
            if name not in headers[file]:
                raise BridgeError(f"{index} places {name} in {file}, which does not hold it; fetch both files again")
        return {name: headers[file][name] for name, file in weight_map.items()}

    def shapes(self) -> dict[str, Shape]:
        """Return name → shape of every tensor."""
        return {name: info.shape for name, info in self.tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype on disk."""
        return self.tensors[name].dtype

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return the tensor, or its slice ``[index]``, as a view of the mapped file. Do not write to it."""
        info = self.tensors[name]
        if info.file not in self._maps:
            self._maps[info.file] = map_file(self.path / info.file)
        tensor = view_of(self._maps[info.file], info.start, info.dtype, info.shape)
        return tensor if index is None else tensor[index]


def map_file(path: Path) -> mmap.mmap:
    """Map a file of any size into memory.

    The mapping is private and writable only because torch warns about read-only memory; nothing writes to it.
    MAP_NORESERVE allows a private mapping that is larger than the memory.
    """
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
    with open_regular(path) as file:
        return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def view_of(data: mmap.mmap, start: int, dtype: torch.dtype, shape: Shape) -> Tensor:
    """Return the tensor [shape] at byte ``start`` of a mapped file: a view, or a copy if the data is not aligned."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    if start % dtype.itemsize:
        raw = torch.frombuffer(data, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
        return raw.clone().view(dtype).view(shape)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start).view(shape)


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Parse ``"5GB"``, ``"500MiB"`` or plain bytes into bytes."""
    number = text.strip().rstrip("BKMGIbkmgi")
    unit = text.strip()[len(number) :].upper() or "B"
    try:
        size = int(float(number) * UNITS[unit])
    except (KeyError, ValueError):
        raise BridgeError(f"the size {text!r} is not valid; write e.g. 5GB or 500MB") from None
    if size <= 0:
        raise BridgeError(f"the size {text!r} must be more than 0; write e.g. 5GB")
    return size


class HfWriter:
    """Writes safetensors files of at most ``max_shard_size`` bytes to a folder; a larger tensor gets its own file.

    ``tensors``: name → (shape, dtype) in the order of the files. ``stem``: prefix of the file names. ``form``: names
    on disk. :meth:`write` may be called in any order and from several threads; :meth:`finish` writes the index and
    syncs.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, tuple[Shape, torch.dtype]],
        max_shard_size: int = 5 * 10**9,
        stem: str = "model",
        form: DiskForm = AS_TEXT,
    ) -> None:
        self.folder = folder
        self._stored: dict[str, TensorInfo] = {}
        tensors = form.stored(tensors)
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
        self.places = form.own(self._stored)

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
        text += b" " * (-len(text) % 8)  # align the data as the library does
        start = 8 + len(text)
        descriptor = os.open(self.folder / file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self._descriptors[file] = descriptor
        write_all(descriptor, memoryview(len(text).to_bytes(8, "little") + text), 0)
        os.ftruncate(descriptor, start + position)
        for name, (begin, end) in offsets.items():
            shape, dtype = tensors[name]
            self._stored[name] = TensorInfo(file, dtype, shape, start + begin, start + end)

    def write(self, name: str, tensor: Tensor, index: int | None = None) -> int:
        """Write a tensor, or its slice ``[index]``, cast to the declared dtype; return the number of bytes written."""
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
            total = sum(place.nbytes for place in self._stored.values())
            weight_map = {name: place.file for name, place in sorted(self._stored.items())}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_file(self.folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(os.fsync, self._descriptors.values()))
        self.close()

    def close(self) -> None:
        """Close the files; may be called twice."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
