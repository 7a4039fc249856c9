"""Prefixes that rows share: which rows begin with the same tokens, and the tree of segments that has each once.

All samples of a prompt begin with it, and calls of an agent begin with the calls before them. A micro-batch computes
the hidden states of such tokens once (``trainer.share_prefixes``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_FIRST_BLOCK, _LARGEST_BLOCK = 64, 256
"""Tokens that are compared at a time: most rows that do not share a long prefix differ soon."""


def prefix_order(tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort rows by their tokens, and return (order [B] int64, shared [B] int64).

    ``tokens``: [N] int32, row after row; ``lengths``: [B]. Row ``order[i]`` begins with the same ``shared[i]`` tokens
    as row ``order[i - 1]``, and any two rows share the least ``shared`` between them. A row comes before those that
    continue it. Reads little more than the shared tokens.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    order, shared = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
    # places in the order whose rows are equal to a neighbour so far, and the run of equal rows that each is in
    places, runs = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
    offset, width = 0, _FIRST_BLOCK
    while len(places) > 1:
        block = _block(tokens, starts[order[places]] + offset, lengths[order[places]] - offset, width)
        same_run, unlike = runs[1:] == runs[:-1], _differences(block)
        unequal = np.isin(runs, runs[1:][same_run & (unlike < width)])  # runs of equal rows need no order
        if unequal.any():
            sorted_rows = np.arange(len(places))
            sorted_rows[unequal] = np.flatnonzero(unequal)[_sorted(runs[unequal], block[unequal])]
            order[places], block = order[places[sorted_rows]], block[sorted_rows]
            unlike = _differences(block)
        equal = same_run & (unlike == width)
        shared[places[1:]] = np.where(same_run, offset + unlike, shared[places[1:]])
        ended = block[:, -1] < 0  # rows that are equal to their end
        both_ended = equal & ended[1:]
        shared[places[1:]] = np.where(both_ended, lengths[order[places[1:]]], shared[places[1:]])
        equal &= ~both_ended
        kept = np.concatenate([equal, [False]]) | np.concatenate([[False], equal])
        runs = np.cumsum(np.concatenate([[True], ~equal]))[kept]
        places = places[kept]
        offset, width = offset + width, min(2 * width, _LARGEST_BLOCK)
    return order, shared


def _block(tokens: np.ndarray, starts: np.ndarray, left: np.ndarray, width: int) -> np.ndarray:
    """Return the ``width`` tokens from ``starts`` [A] on, [A, width] int32; -1 after the ``left`` [A] ones."""
    inside = starts + width <= len(tokens)
    block = np.full((len(starts), width), -1, np.int32)
    if inside.any():
        block[inside] = sliding_window_view(tokens, width)[starts[inside]]
    for row in np.flatnonzero(~inside).tolist():  # the last rows of the batch
        rest = tokens[starts[row] : starts[row] + width]
        block[row, : len(rest)] = rest
    for row in np.flatnonzero(left < width).tolist():
        block[row, max(left[row], 0) :] = -1
    return block


def _differences(block: np.ndarray) -> np.ndarray:
    """Return the first column in which each row differs from the one before it, [A - 1] int64; the width if none."""
    pairs = block.view(np.int64)  # half as many comparisons
    unlike = pairs[1:] != pairs[:-1]
    rows, first = np.arange(len(unlike)), unlike.argmax(1)
    column = 2 * first + (block[1:][rows, 2 * first] == block[:-1][rows, 2 * first])
    differs: np.ndarray = np.where(unlike[rows, first], column, block.shape[1])
    return differs


def _sorted(runs: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Return the order of rows by run, then by tokens: [A] int64."""
    keys = np.empty((len(runs), 1 + block.shape[1]), ">u4")  # big-endian bytes compare as the numbers do
    keys[:, 0], keys[:, 1:] = runs, block + 1
    order: np.ndarray = np.argsort(keys.view(f"S{keys.shape[1] * 4}")[:, 0], kind="stable")
    return order


SHORT = 32
"""Prefixes of fewer tokens are not shared: a segment of its own costs more than they save."""


WORTH = 0.1
"""Share of the tokens from which on sharing pays. Measured on CPU, forward and backward: of 3 % saved 1.04 times as
fast, of 5.5 % 1.09, of 6 % 0.93, of 11 % 1.12, of 12.5 % 1.09, of 25 % 1.16 (``benchmarks/shared_prefixes.py``)."""
_UNEVEN = 1.1
"""A group of rows is cut if it alone takes this times the mean work of a replica."""


@dataclass(frozen=True)
class SharedPrefixes:
    """The rows of a batch in the order of :func:`prefix_order`."""

    order: np.ndarray
    """[B] int64: rows."""
    shared: np.ndarray
    """[B] int64: first tokens of each of these rows that are those of the row before it."""

    @classmethod
    def of(cls, tokens: np.ndarray, lengths: np.ndarray, same: Callable[[int, int, int], int]) -> SharedPrefixes:
        """Find what rows share. ``tokens``: [N] int32; ``lengths``: [B]. ``same(row, other, n)`` returns how many of n
        tokens, which are equal in both rows, also have equal data besides (routes)."""
        order, shared = prefix_order(tokens, lengths)
        for place in np.flatnonzero(shared).tolist():
            shared[place] = same(int(order[place - 1]), int(order[place]), int(shared[place]))
        return cls(order, np.where(shared < SHORT, 0, shared))

    def saved(self, lengths: np.ndarray) -> float:
        """Return the share of the tokens that are another row's too. ``lengths``: [B]."""
        return float(self.shared.sum()) / max(float(lengths.sum()), 1.0)

    def among(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return some of the rows, [b] int64, in this order, and what each shares with the one before it, [b]."""
        places = np.empty(len(self.order), np.int64)
        places[self.order] = np.arange(len(self.order))
        chosen = np.sort(places[rows])
        if not len(chosen):
            return rows, np.zeros(0, np.int64)
        # rows share the least of what those between them do
        upto = self.shared[: chosen[-1] + 1]
        least = np.minimum.reduceat(upto, chosen[:-1] + 1) if len(chosen) > 1 else upto[:0]
        return self.order[chosen], np.concatenate([[0], least])

    def parts(self, lengths: np.ndarray, alignment: int, max_tokens: int, rows: int) -> list[np.ndarray]:
        """Cut the rows into parts that are not split over micro-batches, [rows] int64 each.

        With ``max_tokens`` > 0 a part has up to that number of aligned tokens, each counted once; else ``rows`` rows.
        Rows that share nothing with a neighbour are parts of their own.
        """
        if max_tokens <= 0:
            return [self.order[start : start + rows] for start in range(0, len(self.order), rows)]
        parts: list[list[int]] = []
        tokens = 0
        for row, shared in zip(self.order.tolist(), self.shared.tolist(), strict=True):
            # a branch may cut a segment in two, each aligned
            more = _aligned(int(lengths[row]) - shared, alignment) + (alignment - 1 and alignment)
            if not parts or not shared or tokens + more > max_tokens:
                parts.append([])
                tokens, more = 0, _aligned(int(lengths[row]), alignment)
            parts[-1].append(row)
            tokens += more
        return [np.asarray(part, np.int64) for part in parts]

    def families(
        self, rows: np.ndarray, lengths: np.ndarray, forward: Callable[[np.ndarray], np.ndarray], count: int
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Group some rows by what they share, for ``count`` replicas: (rows of each group, its FLOPs [groups]).

        ``forward``: lengths [n] → FLOPs [n]. Groups that keep replicas from equal work are cut in two near their
        middle, where the rows share least.
        """
        if not len(rows):
            return [], np.zeros(0)
        chosen, shared = self.among(rows)
        groups = np.split(np.arange(len(chosen)), np.flatnonzero(shared[1:] == 0) + 1)

        def cost(group: np.ndarray) -> float:
            tree = PrefixTree.of(lengths[chosen[group]], np.append(0, shared[group[1:]]))
            return float((forward(tree.begins + tree.lengths) - forward(tree.begins)).sum())

        costs = [cost(group) for group in groups]
        while divisible := [number for number, group in enumerate(groups) if len(group) > 1]:
            largest = max(divisible, key=costs.__getitem__)
            if len(groups) >= count and costs[largest] <= _UNEVEN * sum(costs) / count:
                break
            group = groups[largest]
            first, last = max(len(group) // 4, 1), max(len(group) * 3 // 4, 2)
            cut = first + int(shared[group[first:last]].argmin())
            groups[largest : largest + 1] = [group[:cut], group[cut:]]
            costs[largest : largest + 1] = [cost(group[:cut]), cost(group[cut:])]
        return [chosen[group] for group in groups], np.asarray(costs)

    def tokens(self, rows: np.ndarray, lengths: np.ndarray, alignment: int) -> int:
        """Return the tokens of some ``rows`` [b] int64, each counted once, with the padding of their segments.

        ``lengths``: [B].
        """
        chosen, shared = self.among(rows)
        return int(_aligned(PrefixTree.of(lengths[chosen], shared).lengths, alignment).sum())


def _aligned(tokens: Any, alignment: int) -> Any:
    return -(-tokens // alignment) * alignment


@dataclass(frozen=True)
class PrefixTree:
    """The s segments of b rows, each computed once. A row is its last segment with that segment's ancestors.

    Example: rows ``a b x``, ``a b y z`` and ``c``::

        segment   0: a b    1: x     2: y z   3: c
        parents   -1        0        0        -1
        begins    0         2        2        0
        last      1         2        3                of rows
    """

    parents: np.ndarray
    """[s] int64: the segment before each; -1 for none. Those that follow a segment come right after it."""
    begins: np.ndarray
    """[s] int64: position of the segment's first token in its rows."""
    lengths: np.ndarray
    """[s] int64: tokens of the segment."""
    rows: np.ndarray
    """[s] int64: the first row that has the segment."""
    last: np.ndarray
    """[b] int64: the last segment of each row."""

    @classmethod
    def separate(cls, lengths: Sequence[int] | np.ndarray) -> PrefixTree:
        """Make the tree of rows that share nothing: a segment for each. ``lengths``: [b]."""
        numbers, zeros = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
        return cls(zeros - 1, zeros, np.asarray(lengths, np.int64), numbers, numbers)

    @classmethod
    def of(cls, lengths: np.ndarray, shared: np.ndarray) -> PrefixTree:
        """Make the tree of rows in the order of :func:`prefix_order`. ``lengths``, ``shared``: [b] int64."""
        owned, ends = _cuts(lengths, shared)
        parents, begins, sizes, rows = [], [], [], []
        last = np.zeros(len(lengths), np.int64)
        segment_at: list[dict[int, int]] = []  # of each row: where a segment that it begins ends → that segment
        for row, (owner, cuts) in enumerate(zip(owned, ends, strict=True)):
            begin = int(shared[row]) if row else 0
            before = segment_at[owner][begin] if owner >= 0 else -1
            segments: dict[int, int] = {}
            for end in cuts:
                parents.append(before)
                begins.append(begin)
                sizes.append(end - begin)
                rows.append(row)
                begin, before = end, len(parents) - 1
                segments[end] = before
            segment_at.append(segments)
            last[row] = before
        columns = [np.asarray(values, np.int64) for values in (parents, begins, sizes, rows)]
        return cls(columns[0], columns[1], columns[2], columns[3], last)

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def is_flat(self) -> bool:
        """Whether no segment has another before it."""
        return bool((self.parents < 0).all()) and len(self.parents) == len(self.last)

    @cached_property
    def users(self) -> np.ndarray:
        """[s] int64: rows that have each segment."""
        count = np.bincount(self.last[self.last >= 0], minlength=len(self)).astype(np.int64)
        for segment in range(len(self) - 1, -1, -1):
            if (parent := self.parents[segment]) >= 0:
                count[parent] += count[segment]
        return count

    def path(self, segment: int) -> list[int]:
        """Return the segments from the first one to ``segment``."""
        numbers = []
        while segment >= 0:
            numbers.append(segment)
            segment = int(self.parents[segment])
        return numbers[::-1]


def _cuts(lengths: np.ndarray, shared: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """Return for each row the row whose tokens it continues (-1: none), and where the segments that it begins end."""
    ends: list[set[int]] = []
    owners: list[int] = []
    stack: list[tuple[int, int]] = []  # (row, first position that it begins) of the path of the row before
    for row, (length, same) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        same = same if row else 0
        while stack and stack[-1][1] >= same:
            stack.pop()
        owner = stack[-1][0] if stack else -1
        if owner >= 0:
            ends[owner].add(same)
        owners.append(owner)
        ends.append({length} if length > same else set())
        if length > same:
            stack.append((row, same))
    return owners, [sorted(cuts) for cuts in ends]
