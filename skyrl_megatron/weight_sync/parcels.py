"""The two ends of a plan of routes: what one rank sends to whom, what one worker receives from whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skyrl_megatron.weight_sync.routes import Route, Table, Unroutable, name_of


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

    @property
    def peers(self) -> list[int]:
        """Those on the other side that buckets go to or come from."""
        return [int(peer) for peer in np.unique(self.buckets[:, 0])]

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return int(self.buckets[:, 1].sum())


def check_parcels(parcels: Parcels, route: Route) -> None:
    """Raise Unroutable unless a worker's parcels fill what its route fills, each element once."""
    tensor, _, rows, columns, target, offset, by_row, by_column = parcels.copies.T
    none = np.zeros_like(rows)
    planned = Route(
        route.targets, np.column_stack([tensor, target, none, rows, none, columns, offset, by_row, by_column])
    )
    planned.check()
    for target, found, needed in zip(route.targets, planned.covered(), route.covered(), strict=True):
        if found != needed:
            raise Unroutable(f"{found} of {needed} elements of {name_of(target)} are planned")
