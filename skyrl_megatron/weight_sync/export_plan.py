"""The export plan of a rank: every copy and message of a sync to all workers, planned once, then repeated.

All ranks of a tensor's group cut it into the same segments (``buckets.cuts``) and process them in one order. The ranks
that hold rows of a segment send them to the group's rank 0. Rank 0 receives them in the bucket itself, or in a second
buffer if they are not contiguous in the bucket, and copies its own rows. A pass allocates nothing, looks up no names,
and makes one call for the copies of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron.device import shareable_bytes
from skyrl_megatron.weight_sync.buckets import ALIGNMENT, Bucket, cuts, plan_buckets
from skyrl_megatron.weight_sync.tensors import RowRange, TensorShard, WeightSource


@dataclass(slots=True)
class Copies:
    """Copies between views of fixed memory, or of rows that are computed when they are copied."""

    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    made: list[tuple[Tensor, Callable[[], Tensor]]] = field(default_factory=list)

    def add(self, target: Tensor, source: Tensor | Callable[[], Tensor]) -> None:
        """Add a copy to ``target`` [rows, columns], or [ranges, rows, columns]; ``source`` has the same
        shape and dtype."""
        if isinstance(source, Tensor):
            self.targets.append(target)
            self.sources.append(source)
        else:
            self.made.append((target, source))

    def __call__(self) -> None:
        if self.targets:
            # on CUDA one launch for all: a bucket has thousands of small copies, and each launch takes
            # microseconds
            torch._foreach_copy_(self.targets, self.sources)
        for target, make in self.made:
            target.copy_(make())


@dataclass(slots=True)
class Message:
    """Rows from one rank of a group to its rank 0."""

    tensor: Tensor
    group: Any
    owner: int
    packing: Copies | None = None
    """Copies into ``tensor`` that the sending rank makes first; None on the receiving rank."""

    def __call__(self) -> None:
        if self.packing is None:
            dist.recv(self.tensor, group=self.group, group_src=self.owner)
        else:
            self.packing()
            dist.send(self.tensor, group=self.group, group_dst=0)


@dataclass(slots=True)
class Step:
    """The messages and copies that fill one bucket, or those that other ranks still need after the last bucket."""

    messages: list[Message] = field(default_factory=list)
    copies: Copies = field(default_factory=Copies)

    def __call__(self) -> None:
        for message in self.messages:
            message()
        self.copies()


class ExportPlan:
    """A rank's passes over ``source``, in buckets of at most ``bucket_bytes``.

    Two buffers take turns. A rank that gathers rows of several ranks, or packs rows for another, holds a third.
    Raises WeightSyncError if a bucket is too small for a row.
    """

    def __init__(self, source: WeightSource, bucket_bytes: int, device: torch.device) -> None:
        shards = source.shards()
        self.addresses = source.addresses()
        self.buckets: list[Bucket] = plan_buckets([[shard.meta for shard in shards if shard.rank == 0]], bucket_bytes)
        self._bucket_bytes, self._device = bucket_bytes, device
        largest = max((bucket.nbytes for bucket in self.buckets), default=0)
        # two, because one is filled while the receivers read the other
        self._buffers = [self._empty(largest), self._empty(largest)]
        self._inbox = self._outbox = self._empty(0)
        self._taken = 0  # bytes of the inbox that the bucket being compiled uses
        self._steps = self._compile(shards)
        self._done = 0  # steps of the current pass

    def fill(self, number: int) -> Tensor:
        """Fill bucket ``number`` and return its buffer: [nbytes] uint8, valid until bucket ``number + 2`` is filled.

        Buckets are filled in order; :meth:`finish` ends the pass. Raises RuntimeError (torch) when a rank is gone.
        """
        assert number == self._done, (number, self._done)
        self._done += 1
        self._steps[number]()
        return self._buffers[number % 2][: self.buckets[number].nbytes]

    def finish(self) -> None:
        """Run the rest of the pass, because other ranks wait for rows from this rank."""
        # Ranks that gather from this one are still inside their pass. Without these messages they would wait
        # for their timeout.
        left, self._done = self._steps[self._done :], 0
        for step in left:
            step()

    # ------------------------------------------------------------------ compiling
    def _compile(self, shards: Sequence[TensorShard]) -> list[Step]:
        """Make a step for each bucket, and one for the end. Rows for others go out before the next bucket."""
        ours = [(number, segment) for number, bucket in enumerate(self.buckets) for segment in bucket.segments]
        steps = [Step() for _ in range(len(self.buckets) + 1)]
        following = 0
        for shard in shards:
            for start, nbytes in cuts(shard.meta, self._bucket_bytes):
                # an empty tensor may have rows of 0 bytes
                first = start // shard.meta.row_nbytes if nbytes else 0
                rows = range(first, first + (nbytes // shard.meta.row_nbytes if nbytes else 0))
                # Rows for another rank go out before this rank's next bucket. That bucket is received only
                # after the other rank's, so sending it first would make both ranks wait for each other.
                number = ours[following][0] if following < len(ours) else len(self.buckets)
                if shard.rank == 0:
                    segment = ours[following][1]
                    if following == 0 or ours[following - 1][0] != number:
                        # the copies out of the inbox for the previous bucket are done by then
                        self._taken = 0
                    following += 1
                    stretch = self._buffers[number % 2][segment.offset : segment.offset + nbytes]
                    self._collect(shard, rows, stretch, steps[number])
                else:
                    self._give(shard, rows, steps[number])
        return steps

    def _collect(self, shard: TensorShard, rows: range, stretch: Tensor, step: Step) -> None:
        """Fill a stretch of a bucket with ``rows`` of a tensor that this rank sends."""
        target = stretch.view(shard.local.dtype).view(len(rows), -1) if rows else stretch.view(0, 1)
        width = shard.local.shape[1]
        for owner, ranges in _by_owner(shard, rows):
            if owner == shard.rank:
                for run in _runs(ranges, joined=shard.make is None):
                    rows_in_bucket, source = _place(target, run.span, width), _source(shard, run.span)
                    rows_in_bucket = run.of(rows_in_bucket, run.starts * target.stride(0))
                    if isinstance(source, Tensor):
                        source = run.of(source, run.firsts * shard.local.stride(0))
                    step.copies.add(rows_in_bucket, source)
                continue
            places = [_place(target, span, width) for span in ranges]
            if len(places) == 1 and places[0].is_contiguous():
                step.messages.append(Message(places[0], shard.group, owner))
            else:
                rows_of_owner = self._take_inbox(sum(span.count for span in ranges), shard.local)
                step.messages.append(Message(rows_of_owner, shard.group, owner))
                for rows_in_bucket, source in zip(
                    places, torch.split(rows_of_owner, [span.count for span in ranges]), strict=True
                ):
                    step.copies.add(rows_in_bucket, source)

    def _give(self, shard: TensorShard, rows: range, step: Step) -> None:
        """Send what this rank holds of ``rows`` to rank 0 of the shard's group."""
        for owner, ranges in _by_owner(shard, rows):
            if owner != shard.rank:
                continue
            sources = [_source(shard, span) for span in ranges]
            # an empty packing marks the sending side of a message, see Message
            if len(sources) == 1 and isinstance(sources[0], Tensor) and sources[0].is_contiguous():
                step.messages.append(Message(sources[0], shard.group, owner, Copies()))
                continue
            # One buffer for all messages: dist.send returns when it may be filled again (gloo has sent it, NCCL has
            # ordered the send before later work on the stream).
            if not self._outbox.numel():
                self._outbox = self._empty(self._bucket_bytes)
            packed = _view(self._outbox, sum(span.count for span in ranges), shard.local)
            packing = Copies()
            for target, source in zip(torch.split(packed, [span.count for span in ranges]), sources, strict=True):
                packing.add(target, source)
            step.messages.append(Message(packed, shard.group, owner, packing))

    def _take_inbox(self, rows: int, like: Tensor) -> Tensor:
        """Reserve [rows, columns of ``like``] in the second buffer."""
        if not self._inbox.numel():
            self._inbox = self._empty(self._bucket_bytes)
        taken = _view(self._inbox[self._taken :], rows, like)
        self._taken += -(-taken.nbytes // ALIGNMENT) * ALIGNMENT
        return taken

    def _empty(self, nbytes: int) -> Tensor:
        return shareable_bytes(nbytes, self._device)


def _view(memory: Tensor, rows: int, like: Tensor) -> Tensor:
    """View the beginning of ``memory`` as [rows, columns of ``like``]."""
    return memory[: rows * like.shape[1] * like.itemsize].view(like.dtype).view(rows, like.shape[1])


def _by_owner(shard: TensorShard, rows: range) -> Iterator[tuple[int, list[RowRange]]]:
    """Yield, by owner, the ranges that make up ``rows`` of a tensor; starts are relative to the first of ``rows``."""
    found: dict[int, list[RowRange]] = {}
    for span in shard.ranges:
        start, stop = max(span.start, rows.start), min(span.start + span.count, rows.stop)
        if start < stop:
            first = span.first + (start - span.start) * span.step
            clipped = replace(span, start=start - rows.start, count=stop - start, first=first)
            found.setdefault(span.owner, []).append(clipped)
    yield from found.items()


@dataclass(slots=True)
class _Run:
    """Equal ranges at evenly spaced positions, such as a projection's rows of every expert."""

    span: RowRange
    """The first range."""
    count: int = 1
    starts: int = 0
    """Rows of the tensor from one range to the next."""
    firsts: int = 0
    """Rows of the shard from one range to the next."""

    def takes(self, span: RowRange) -> bool:
        """Add a range if it continues the run, and return whether it does."""
        starts, firsts = span.start - self.span.start, span.first - self.span.first
        # torch has no negative strides, so positions have to increase
        if replace(span, start=self.span.start, first=self.span.first) != self.span or min(starts, firsts) <= 0:
            return False
        if self.count == 1:
            self.starts, self.firsts = starts, firsts
        if (starts, firsts) != (self.count * self.starts, self.count * self.firsts):
            return False
        self.count += 1
        return True

    def of(self, first: Tensor, stride: int) -> Tensor:
        """View [ranges, rows, columns] starting at ``first``; ``stride``: elements from one range to the next."""
        if self.count == 1:
            return first
        return first.as_strided((self.count, *first.shape), (stride, *first.stride()), first.storage_offset())


def _runs(ranges: Sequence[RowRange], *, joined: bool) -> list[_Run]:
    """Join ranges of one owner into as few strided copies as possible, unless rows are computed when copied."""
    runs: list[_Run] = []
    for span in ranges:
        if not (joined and runs and runs[-1].takes(span)):
            runs.append(_Run(span))
    return runs


def _place(target: Tensor, span: RowRange, width: int) -> Tensor:
    """View the memory of the rows of ``span`` in a tensor."""
    return target[span.start : span.start + span.count, span.column : span.column + width]


def _source(shard: TensorShard, span: RowRange) -> Tensor | Callable[[], Tensor]:
    """View the rows of ``span`` in this rank's shard, or return a function that computes them."""
    return shard.part(slice(span.first, span.first + span.step * (span.count - 1) + 1, span.step), slice(None))
