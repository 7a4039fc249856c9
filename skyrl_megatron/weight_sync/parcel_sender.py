"""A trainer rank's end of a sync by routes: its buckets, packed from the shards and sent to one worker each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from skyrl_megatron.device import shareable_bytes
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import TensorMeta, checksum
from skyrl_megatron.weight_sync.parcels import Parcels, Run
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
        buckets = parcels.buckets.tolist()
        runs = [[each for run in of_bucket for each in _made_alone(run, shards)] for of_bucket in parcels.runs()]
        parts = [[_part(shards[run.copy[4]], run) for run in of_bucket] for of_bucket in runs]
        alone = [in_place and bool(bucket[2]) for bucket in buckets]
        direct = [_in_place(each[0]) if is_alone else None for is_alone, each in zip(alone, parts, strict=True)]
        sizes = zip(buckets, direct, strict=True)
        largest = max((nbytes for (_, nbytes, *_), content in sizes if content is None), default=0)
        self._buffers = [shareable_bytes(largest, device) for _ in range(STAGED)]
        free = itertools.cycle(self._buffers)
        for (_, nbytes, *_), of_bucket, each, content in zip(buckets, runs, parts, direct, strict=True):
            self._firsts.append(shards[of_bucket[0].copy[4]].meta)
            if content is not None:
                self._contents.append((content, None))
                continue
            buffer, packing = next(free)[:nbytes], Copies()
            for run, part in zip(of_bucket, each, strict=True):
                packing.add(run.piece(buffer, shards[run.copy[4]].local.dtype), part)
            self._contents.append((buffer, packing))

    def send(self, transport: Transport | None, travels: Callable[[str], bool]) -> list[list[int]]:
        """Send the buckets of adapters that ``travels`` says; return (worker, checksum) of each, in order. Raises
        RuntimeError (torch) when a worker is gone, WeightSyncError without a ``transport`` where there is a bucket."""
        if not self._contents:
            return []
        if transport is None:
            raise WeightSyncError("send: no engine is connected: connect() comes first")
        travelling: list[tuple[Tensor, Callable[[], None]]] = []
        sums: list[Tensor] = []
        workers = [worker for worker, *_ in self.parcels.buckets.tolist()]
        chosen = [number for number, meta in enumerate(self._firsts) if travels(meta.adapter)]
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


def _made_alone(run: Run, shards: Sequence[TensorShard]) -> Iterator[Run]:
    """Yield the run, or copy by copy what is made when it is copied."""
    if run.count == 1 or shards[run.copy[4]].make is None:
        yield run
        return
    tensor, at, rows, columns, shard, first, *rest = run.copy
    for n in range(run.count):
        yield Run([tensor, at + n * run.bytes_apart, rows, columns, shard, first + n * run.apart, *rest], 1, 0, 0)


def _part(shard: TensorShard, run: Run) -> Tensor | Callable[[], Tensor]:
    """View the rows and columns of copies in their shard, or return what makes them."""
    _, _, rows, columns, _, first, step, column = run.copy
    shape = shard.local.shape
    if first + (run.count - 1) * run.apart + (rows - 1) * step >= shape[0] or column + columns > shape[1]:
        raise WeightSyncError(f"rows {first} … of a shard {list(shape)} are planned, which it does not have")
    part = shard.part(slice(first, first + (rows - 1) * step + 1, step), slice(column, column + columns))
    return run.of(part, run.apart * shard.local.stride(0)) if isinstance(part, Tensor) else part


def _in_place(part: Tensor | Callable[[], Tensor]) -> Tensor | None:
    """View the bytes of a part as they lie in memory; None: not in one piece."""
    return part.flatten().view(torch.uint8) if isinstance(part, Tensor) and part.is_contiguous() else None
