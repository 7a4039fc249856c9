"""Which weights an adapter belongs to: a fingerprint of a HF folder, quick to take also of hundreds of gigabytes."""

from __future__ import annotations

import os
from pathlib import Path

import blake3

from bridges.files import open_regular

SAMPLES, SAMPLE_BYTES = 64, 64 * 2**10


def fingerprint(folder: Path) -> str:
    """Return a BLAKE3 hash over every safetensors file of a folder: its name, size, header, and 64 pieces of 64 KiB
    spread evenly over its data (all of it where it has no more). Equal for copies of the folder; weights that a
    training step has changed differ in every piece."""
    hasher = blake3.blake3()
    for path in sorted(folder.glob("*.safetensors")):
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            hasher.update(f"{path.name}\0{size}\0".encode())
            header = file.read(8)
            hasher.update(header + file.read(min(int.from_bytes(header, "little"), size)))
            start = file.tell()
            for place in _places(start, size):
                hasher.update(os.pread(file.fileno(), SAMPLE_BYTES, place))
    return hasher.hexdigest()


def _places(start: int, stop: int) -> list[int]:
    """Return where the pieces of ``[start, stop)`` begin."""
    if stop - start <= SAMPLES * SAMPLE_BYTES:
        return list(range(start, stop, SAMPLE_BYTES))
    return [start + (stop - start - SAMPLE_BYTES) * piece // (SAMPLES - 1) for piece in range(SAMPLES)]
