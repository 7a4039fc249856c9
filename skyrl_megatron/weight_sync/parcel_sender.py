"""A trainer rank's end of a sync by routes: its buckets, packed from the shards and sent to one worker each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import TensorMeta, checksum
from skyrl_megatron.weight_sync.parcels import Parcels
from skyrl_megatron.weight_sync.plan import Copies
from skyrl_megatron.weight_sync.source import TensorShard
from skyrl_megatron.weight_sync.transport import Transport

STAGED, AHEAD = 2, 16
"""Buckets on their way at once: those that lie in a buffer, and all of them."""


class ParcelSender:
    """The buckets of ``parcels``, of parts of ``shards``, which stay where they are or are made when they are copied.

    ``ranks_of``: worker → its rank in the group. ``in_place``: large pieces may be sent from where they lie.
    """

    def __init__(
        self,
        parcels: Parcels,
        shards: Sequence[TensorShard],
        ranks_of: dict[int, int],
        device: torch.device,
        *,
        in_place: bool = True,
    ) -> None:
        self.parcels, self.ranks_of, self.device = parcels, ranks_of, device
        self._firsts: list[TensorMeta] = []
        """The first tensor in each bucket."""
        self._contents: list[tuple[Tensor, Copies | None]] = []
        buckets, copies = parcels.buckets.tolist(), parcels.copies.tolist()
        parts = [[_part(shards[copy[4]], copy) for copy in copies[first:stop]] for _, _, _, first, stop, _ in buckets]
        alone = [in_place and bool(bucket[2]) for bucket in buckets]
        direct = [_in_place(each[0]) if is_alone else None for is_alone, each in zip(alone, parts, strict=True)]
        sizes = zip(buckets, direct, strict=True)
        largest = max((nbytes for (_, nbytes, *_), content in sizes if content is None), default=0)
        self._buffers = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(STAGED)]
        free = itertools.cycle(self._buffers)
        for (_, nbytes, _, first, stop, _), each, content in zip(buckets, parts, direct, strict=True):
            self._firsts.append(shards[copies[first][4]].meta)
            if content is not None:
                self._contents.append((content, None))
                continue
            buffer, packing = next(free)[:nbytes], Copies()
            for part, (_, at, rows, columns, shard, *_) in zip(each, copies[first:stop], strict=True):
                dtype = shards[shard].local.dtype
                packing.add(buffer[at : at + rows * columns * dtype.itemsize].view(dtype).view(rows, columns), part)
            self._contents.append((buffer, packing))

    def send(self, transport: Transport, travels: Callable[[TensorMeta], bool]) -> list[list[int]]:
        """Send the buckets of tensors that ``travels`` says; return (worker, checksum) of each, in order. Raises
        RuntimeError (torch) when a worker is gone."""
        travelling: list[tuple[Tensor, Callable[[], None]]] = []
        sums: list[Tensor] = []
        workers = [worker for worker, *_ in self.parcels.buckets.tolist()]
        chosen = [number for number, meta in enumerate(self._firsts) if travels(meta)]
        for number in chosen:
            content, copies = self._contents[number]
            while len(travelling) >= AHEAD or (
                copies is not None and any(_same_memory(each, content) for each, _ in travelling)
            ):
                travelling.pop(0)[1]()
            if copies is not None:
                copies()
            sums.append(checksum(content))
            travelling.append((content, transport.send(content, self.ranks_of[workers[number]])))
        for _, wait in travelling:
            wait()
        totals = torch.stack(sums).tolist() if sums else []
        return [[workers[number], total] for number, total in zip(chosen, totals, strict=True)]


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def _part(shard: TensorShard, copy: Sequence[int]) -> Tensor | Callable[[], Tensor]:
    """View the rows and columns of a copy in its shard, or return what makes them."""
    _, _, rows, columns, _, first, step, column = copy
    shape = shard.local.shape
    if first + (rows - 1) * step >= shape[0] or column + columns > shape[1]:
        raise WeightSyncError(f"rows {first} … of a shard {list(shape)} are planned, which it does not have")
    return shard.part(slice(first, first + (rows - 1) * step + 1, step), slice(column, column + columns))


def _in_place(part: Tensor | Callable[[], Tensor]) -> Tensor | None:
    """View the bytes of a part as they lie in memory; None: not in one piece."""
    return part.flatten().view(torch.uint8) if isinstance(part, Tensor) and part.is_contiguous() else None
