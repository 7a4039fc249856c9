"""Packing sequences into micro-batches under a token budget."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack_by_tokens(lengths: np.ndarray, cap: int, *, min_bins: int = 1, multiple_of: int = 1) -> list[np.ndarray]:
    """Few bins of sequences with at most ``cap`` tokens each: best fit, longest first.

    ``lengths``: [n] positive tokens. Returns index arrays, each ascending, that together hold every sequence once. The
    number of bins is raised to at least ``min_bins`` and to a multiple of ``multiple_of`` by splitting full bins, as
    far as there are sequences to split; bins that stay empty are returned as empty arrays. Best fit decreasing needs
    at most 11/9 of the optimum plus one bin (Johnson 1973) and next to nothing extra when bins hold many sequences.

    Raises ValueError naming the first sequence longer than ``cap``.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    too_long = np.flatnonzero(lengths > cap)
    if len(too_long):
        row = int(too_long[0])
        raise ValueError(f"sequence {row} has {int(lengths[row])} tokens, the budget of a micro-batch is {cap}")
    bins = _best_fit(lengths, cap)
    count = -(-max(len(bins), min_bins) // multiple_of) * multiple_of
    return split_to_count([np.sort(np.asarray(rows, dtype=np.int64)) for rows in bins], lengths, count)


def _best_fit(lengths: np.ndarray, cap: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        place = bisect_left(free, (length, -1))
        if place < len(free):
            left, target = free.pop(place)
            bins[target].append(row)
        else:
            left, target = cap, len(bins)
            bins.append([row])
        if left > length:
            insort(free, (left - length, target))
    return bins


def split_to_count(bins: list[np.ndarray], lengths: np.ndarray, count: int) -> list[np.ndarray]:
    """Halve the fullest bins that hold more than one sequence until there are ``count``; then add empty ones."""
    bins = list(bins)
    while len(bins) < count:
        fullest = max(
            (i for i, rows in enumerate(bins) if len(rows) > 1),
            key=lambda i: int(lengths[bins[i]].sum()),
            default=None,
        )
        if fullest is None:
            break
        rows = bins.pop(fullest)
        bins += [rows[::2], rows[1::2]]
    return bins + [np.zeros(0, dtype=np.int64) for _ in range(count - len(bins))]
