"""A trainer rank's end of a sync by routes: its buckets, packed from the shards and sent to one worker each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import checksum
from skyrl_megatron.weight_sync.parcels import Parcels
from skyrl_megatron.weight_sync.plan import Copies
from skyrl_megatron.weight_sync.transport import Transport

STAGED, AHEAD = 2, 16
"""Buckets on their way at once: those that lie in a buffer, and all of them."""


class ParcelSender:
    """The buckets of ``parcels``, of rows of ``shards`` ([rows, columns] each, which stay where they are).

    ``ranks_of``: worker → its rank in the group.
    """

    def __init__(
        self, parcels: Parcels, shards: Sequence[Tensor], ranks_of: dict[int, int], device: torch.device
    ) -> None:
        self.parcels, self.ranks_of, self.device = parcels, ranks_of, device
        self._contents: list[tuple[Tensor, Copies | None]] = []
        largest = max((int(bucket[1]) for bucket in parcels.buckets if not bucket[2]), default=0)
        self._buffers = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(STAGED)]
        staged = 0
        for _, nbytes, direct, first, stop, _ in parcels.buckets.tolist():
            views = [_rows(shards[c[4]], c) for c in parcels.copies[first:stop].tolist()]
            if direct and views[0].is_contiguous():
                self._contents.append((views[0].flatten().view(torch.uint8), None))
                continue
            buffer, copies = self._buffers[staged % STAGED][:nbytes], Copies()
            staged += 1
            for view, (_, at, *_) in zip(views, parcels.copies[first:stop].tolist(), strict=True):
                copies.add(buffer[at : at + view.numel() * view.itemsize].view(view.dtype).view(view.shape), view)
            self._contents.append((buffer, copies))

    def send(self, transport: Transport) -> list[list[int]]:
        """Send everything; return (worker, checksum) of each bucket, in order. Raises RuntimeError (torch) when a
        worker is gone."""
        travelling: list[tuple[bool, Callable[[], None]]] = []
        sums: list[Tensor] = []
        for (worker, *_), (content, copies) in zip(self.parcels.buckets.tolist(), self._contents, strict=True):
            staged = copies is not None
            while len(travelling) >= AHEAD or (staged and sum(each for each, _ in travelling) >= STAGED):
                travelling.pop(0)[1]()
            if copies is not None:
                copies()
            sums.append(checksum(content))
            travelling.append((staged, transport.send(content, self.ranks_of[worker])))
        for _, wait in travelling:
            wait()
        workers = self.parcels.buckets[:, 0].tolist()
        return [list(pair) for pair in zip(workers, torch.stack(sums).tolist() if sums else [], strict=True)]


def _rows(shard: Tensor, copy: Sequence[int]) -> Tensor:
    """View the rows and columns of a copy in its shard."""
    _, _, rows, columns, _, first, step, column = copy
    if first + (rows - 1) * step >= len(shard) or column + columns > shard.shape[1]:
        raise WeightSyncError(f"rows {first} … of a shard {list(shard.shape)} are planned, which it does not have")
    return shard[first : first + (rows - 1) * step + 1 : step, column : column + columns]
