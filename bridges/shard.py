"""Splitting a Megatron tensor over tp or etp and putting it together: pure functions of (size, rank).

The rules, with tp=2:

- a plain split takes equal runs of dim 0 or 1;
- gate and up are split each on its own: rank 0 holds ``[gate[:f/2]; up[:f/2]]``, not the gate half;
- q, k, v rows are split by whole KV groups (a group's rows evenly if there are more ranks than groups), output
  projections by whole heads;
- a vocabulary is padded with zero rows first, to ``padded_vocab`` rows or to the next multiple of the size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bridges.errors import BridgeError
from bridges.rows import Shape
from bridges.rules import Entry


def padded_rows(rows: int, size: int, padded_vocab: int | None = None) -> int:
    """Count a vocabulary's rows over all ranks: ``padded_vocab`` if given, else the next multiple of ``size``."""
    padded = padded_vocab if padded_vocab is not None else -(-rows // size) * size
    if padded < rows or padded % size:
        raise BridgeError(f"a padded vocabulary of {padded} must hold {rows} rows and be a multiple of tp={size}")
    return padded


def check_divisible(entry: Entry, size: int) -> None:
    """Raise :class:`BridgeError` if the entry cannot be split evenly over ``size`` ranks."""
    split = entry.split
    if split.dim is None or split.vocab or size == 1:
        return
    length = entry.shape[split.dim] // split.parts
    units = split.units or length
    if units % size and not (split.shared and size % units == 0 and length % size == 0):
        what = "heads or KV groups" if split.units else f"entries along dim {split.dim}"
        kind = "etp" if entry.is_expert else "tp"
        raise BridgeError(f"{entry.name}: {units} {what} cannot be split over {kind}={size}; use a divisor of {units}")


def local_shape(entry: Entry, size: int, padded_vocab: int | None = None) -> Shape:
    """Return shape of one rank's share."""
    split = entry.split
    if split.dim is None:
        return entry.shape
    check_divisible(entry, size)
    shape = list(entry.shape)
    if split.vocab:
        shape[0] = padded_rows(shape[0], size, padded_vocab)
    shape[split.dim] //= size
    return tuple(shape)


def shard(tensor: Tensor, entry: Entry, size: int, rank: int, padded_vocab: int | None = None) -> Tensor:
    """Return the share of ``rank`` out of ``size``: a view where the share is one run of rows, else a copy.

    ``tensor`` has the entry's global shape (vocabulary not padded).
    """
    split = entry.split
    if split.dim is None:
        return tensor
    check_divisible(entry, size)
    if split.vocab:
        padded = padded_rows(tensor.shape[0], size, padded_vocab)
        rows = padded // size
        share = tensor[rank * rows : (rank + 1) * rows]
        missing = rows - share.shape[0]
        return share if not missing else torch.cat([share, share.new_zeros(missing, *share.shape[1:])])
    pieces = [part.chunk(size, dim=split.dim)[rank] for part in tensor.chunk(split.parts)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def unshard(shares: Sequence[Tensor], entry: Entry) -> Tensor:
    """Return the inverse of :func:`shard`: one share per rank → the global tensor, vocabulary padding cut off."""
    split = entry.split
    if split.dim is None or len(shares) == 1:
        whole = shares[0]
        return whole[: entry.shape[0]] if split.vocab else whole
    if split.vocab:
        return torch.cat(list(shares))[: entry.shape[0]]
    by_part = zip(*(share.chunk(split.parts) for share in shares), strict=True)
    whole_parts = [torch.cat(pieces, dim=split.dim) for pieces in by_part]
    return whole_parts[0] if len(whole_parts) == 1 else torch.cat(whole_parts)
