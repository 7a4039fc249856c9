"""The two ends of a plan of routes: what one rank sends to whom, what one worker receives from whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.weight_sync.routes import Route, Table, Unroutable, name_of, named_ranks


@dataclass(frozen=True, slots=True)
class Run:
    """Copies of one bucket, evenly spaced."""

    copy: list[int]
    """The first of them, a row of :attr:`Parcels.copies`."""
    count: int
    bytes_apart: int
    """In the bucket, from one to the next."""
    apart: int
    """On this side, from one to the next: elements of a target, rows of a shard."""

    def piece(self, bucket: Tensor, dtype: torch.dtype) -> Tensor:
        """View the copies in the bytes of a bucket: [rows, columns], of several [count, rows, columns]."""
        _, at, rows, columns, *_ = self.copy
        size = rows * columns * dtype.itemsize
        whole = bucket[at : at + (self.count - 1) * self.bytes_apart + size].view(dtype)
        if self.count == 1:
            return whole.view(rows, columns)
        return whole.as_strided((self.count, rows, columns), (self.bytes_apart // dtype.itemsize, columns, 1))

    def of(self, first: Tensor, apart: int) -> Tensor:
        """View all of them where the first is. ``apart``: elements from one to the next."""
        if self.count == 1:
            return first
        return first.as_strided((self.count, *first.shape), (apart, *first.stride()))


@dataclass(frozen=True, slots=True)
class Parcels:
    """One side's buckets and the copies in them.

    ``buckets`` [b, 6]: the other side's number; bytes; whether it is one contiguous copy; first copy and the one after
    the last; the last copy's tensor. ``copies`` [n, 8]: tensor, first byte in the bucket, rows, columns, and of a
    sender the shard, first row, rows from one to the next, first column; of a receiver the target, offset, row stride,
    column stride.
    """

    buckets: Table
    copies: Table

    @property
    def plain(self) -> tuple[bytes, bytes]:
        """The parcels as they are sent to their side."""
        return self.buckets.tobytes(), self.copies.tobytes()

    @classmethod
    def of_plain(cls, buckets: bytes, copies: bytes) -> Parcels:
        """Undo :attr:`plain`."""
        return cls(np.frombuffer(buckets, np.int64).reshape(-1, 6), np.frombuffer(copies, np.int64).reshape(-1, 8))

    def runs(self) -> list[list[Run]]:
        """Return the copies of each bucket, joined where they are alike but for their places in the bucket and on this
        side, which are evenly spaced: a projection's rows of every expert."""
        steps = np.diff(self.copies, axis=0)
        alike = ~steps[:, [0, 2, 3, 4, 6, 7]].any(1)
        begins = np.ones(len(self.copies), bool)
        begins[1:] = ~alike
        begins[2:] |= alike[:-1] & (steps[1:, [1, 5]] != steps[:-1, [1, 5]]).any(1)
        begins[self.buckets[:, 3][self.buckets[:, 3] < self.buckets[:, 4]]] = True
        first = np.flatnonzero(begins)
        count = np.diff(first, append=len(begins))
        apart = np.zeros((len(first), 2), np.int64)
        apart[count > 1] = steps[first[count > 1]][:, [1, 5]]
        found = list(map(Run, self.copies[first].tolist(), count.tolist(), *apart.T.tolist()))
        bounds = np.searchsorted(first, self.buckets[:, 3:5]).tolist()
        return [found[begin:end] for begin, end in bounds]

    @property
    def peers(self) -> list[int]:
        """Those on the other side that buckets go to or come from."""
        return [int(peer) for peer in np.unique(self.buckets[:, 0])]

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return int(self.buckets[:, 1].sum())


def check_parcels(parcels: Parcels, route: Route) -> None:
    """Raise Unroutable, naming the ranks that would send it, unless a worker's parcels fill what its route fills, each
    element once."""
    tensor, _, rows, columns, target, offset, by_row, by_column = parcels.copies.T
    none = np.zeros_like(rows)
    planned = Route(
        route.targets, np.column_stack([tensor, target, none, rows, none, columns, offset, by_row, by_column])
    )
    if len(target) and target.max() >= len(route.targets):
        raise Unroutable(
            f"target {target.max()} is planned, and the engine's worker has {len(route.targets)}: its layout is not "
            "the one that the plan was made for"
        )
    if (wrong := planned.wrong()) is not None:
        number, element, what = wrong
        raise Unroutable(f"element {element} of {name_of(route.targets[number])} {what}, {_from(parcels, number)}")
    for number, (found, needed) in enumerate(zip(planned.covered(), route.covered(), strict=True)):
        if found != needed:
            name = name_of(route.targets[number])
            raise Unroutable(f"{found} of {needed} elements of {name} are planned, {_from(parcels, number)}")


def _from(parcels: Parcels, target: int) -> str:
    """Name the ranks that parcels of a target come from, in words."""
    ranks = {
        rank
        for rank, _, _, first, stop, _ in parcels.buckets.tolist()
        if (parcels.copies[first:stop, 4] == target).any()
    }
    return f"from {named_ranks(ranks)}"
