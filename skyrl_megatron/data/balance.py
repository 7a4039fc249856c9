"""Dealing weighted items out to groups of nearly equal weight."""

from __future__ import annotations

import heapq

import numpy as np


def balance(costs: np.ndarray, k: int, *, equal_counts: bool = False) -> list[np.ndarray]:
    """``k`` groups with nearly equal sums: each item, heaviest first, goes to the lightest group (LPT, Graham 1969).

    ``costs``: [n] non-negative. Returns index arrays, each ascending, that together hold every item once. With
    ``equal_counts`` every group takes ⌊n/k⌋ or ⌈n/k⌉ items. Raises ValueError when there are fewer items than groups.
    """
    costs = np.asarray(costs, dtype=np.float64)
    if len(costs) < k:
        raise ValueError(f"{len(costs)} items cannot fill {k} groups")
    room, extra = divmod(len(costs), k) if equal_counts else (len(costs), 0)
    groups: list[list[int]] = [[] for _ in range(k)]
    lightest = [(0.0, group) for group in range(k)]
    values = costs.tolist()
    for item in np.argsort(-costs, kind="stable").tolist():
        weight, group = lightest[0]
        groups[group].append(item)
        if len(groups[group]) == room and equal_counts and extra:
            extra -= 1  # one of the groups that take an item more
            heapq.heapreplace(lightest, (weight + values[item], group))
        elif equal_counts and len(groups[group]) >= room:
            heapq.heappop(lightest)
        else:
            heapq.heapreplace(lightest, (weight + values[item], group))
    return [np.sort(np.asarray(group, dtype=np.int64)) for group in groups]
