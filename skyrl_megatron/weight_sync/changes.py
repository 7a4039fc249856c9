"""What changed in a tensor since its last version: the elements that differ in any bit, and where they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_megatron.errors import WeightSyncError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAPS = tuple(np.dtype(name) for name in ("<u1", "<u2", "<u4", "<u8"))


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor's way from one version to the next."""

    count: int
    """Elements that changed; −1: all of it is written."""
    gap_bytes: int
    """Bytes of each gap between changed elements, 0 where there are none."""
    payload: bytes
    """Of some elements the gaps, then the new values; of all of them the values."""


def change_of(old: Tensor | None, new: Tensor) -> TensorChange:
    """Return how ``old`` becomes ``new`` ([any shape], contiguous, on the CPU); None: it is new.

    Bits are compared, so that zeros of either sign and every NaN are values of their own. Gaps count the elements that
    stay between two that change, in the narrowest type that holds the largest. All of a tensor is written where that
    takes no more bytes.
    """
    bits = bits_of(new)
    if old is None:
        return TensorChange(-1, 0, bits.numpy().tobytes())
    places = (bits_of(old) != bits).nonzero().flatten().numpy()
    if not len(places):
        return TensorChange(0, 0, b"")
    gaps = np.diff(places, prepend=-1) - 1
    width = next(dtype for dtype in _GAPS if gaps.max() <= np.iinfo(dtype).max)
    if len(places) * (width.itemsize + new.element_size()) >= new.nbytes:
        return TensorChange(-1, 0, bits.numpy().tobytes())
    return TensorChange(len(places), width.itemsize, gaps.astype(width).tobytes() + bits.numpy()[places].tobytes())


def apply_change(change: TensorChange, tensor: Tensor, name: str) -> None:
    """Make a tensor's next version of it in place. Raises WeightSyncError for a payload that does not fit it."""
    bits = bits_of(tensor).numpy()
    size = bits.itemsize
    if change.count < 0:
        if len(change.payload) != bits.nbytes:
            raise WeightSyncError(f"{name}: {len(change.payload)} bytes are stored of a tensor of {bits.nbytes}")
        bits[:] = np.frombuffer(change.payload, bits.dtype)
        return
    if len(change.payload) != change.count * (change.gap_bytes + size):
        raise WeightSyncError(f"{name}: {len(change.payload)} bytes are stored of {change.count} changed elements")
    if not change.count:
        return
    gaps: NDArray[np.uint64] = np.frombuffer(change.payload, f"<u{change.gap_bytes}", change.count).astype(np.uint64)
    places = np.cumsum(gaps + np.uint64(1)) - np.uint64(1)
    if places[-1] >= bits.size:
        raise WeightSyncError(f"{name}: element {places[-1]} changed of a tensor of {bits.size}")
    bits[places] = np.frombuffer(change.payload, bits.dtype, offset=change.count * change.gap_bytes)


def bits_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as integers of its elements' size, [n]."""
    return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
