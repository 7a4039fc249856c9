"""Tensors of the trainer that an engine holds otherwise, whatever form its kernels keep them in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch

EXPERT = re.compile(r"experts\.(\d+)\.|experts\..*\.(\d+)$")


def altered(trainer: Mapping[str, np.ndarray], engine: Mapping[str, np.ndarray], dtype: str) -> list[str]:
    """Return a line for each tensor of ``trainer`` (HF's names) that ``engine`` (vLLM's) does not hold as it is.

    Engines put several tensors into one, so that a matrix is looked for row by row, and a vector as a stretch of
    another. Experts that a kernel has packed are looked for value by value among those of the same expert.
    ``dtype``: of the engine's weights, in which both are compared.
    """
    rows = {row.tobytes() for tensor in engine.values() for row in _matrix(tensor)}
    vectors = [tensor.tobytes() for tensor in engine.values() if tensor.ndim == 1]
    packed = [tensor for tensor in engine.values() if tensor.ndim == 3]
    found = []
    for name, plain in trainer.items():
        forms = [plain, rounded(plain, dtype)]  # an engine may keep some tensors, such as a router, in fp32
        if plain.ndim == 1:
            if not any(form.tobytes() in vector for form in forms for vector in vectors):
                found.append(f"{name} is another: the engine holds no such vector")
            continue
        missing, count, what = min((_missing(form, rows) for form in forms), key=lambda each: each[0])
        if missing and (expert := EXPERT.search(name)) and packed:
            number = int(expert[1] or expert[2])
            values = [tensor[number] for tensor in packed if number < len(tensor)]
            missing, count, what = min(_missing_values(form, each) for form in forms for each in values)
        if missing:
            found.append(f"{name} is another: {missing} of its {count} {what} are not in the engine")
    return found


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return fp32 values as they are after a stay in another type."""
    return torch.from_numpy(values.copy()).to(getattr(torch, dtype)).float().numpy()


def _matrix(tensor: np.ndarray) -> Sequence[np.ndarray]:
    return [] if tensor.ndim < 2 else list(tensor.reshape(-1, tensor.shape[-1]) + np.float32(0.0))  # no −0


def _missing(tensor: np.ndarray, rows: set[bytes]) -> tuple[int, int, str]:
    own = _matrix(tensor)
    return sum(row.tobytes() not in rows for row in own), len(own), "rows"


def _missing_values(tensor: np.ndarray, among: np.ndarray) -> tuple[int, int, str]:
    return int((~np.isin(tensor, among)).sum()), tensor.size, "values"
