"""Numbers of a run by name, kept small: four bytes each, and bounded however long the run is."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

LARGEST = 1_200_000
"""Numbers that a page gets; longer runs are thinned, extremes kept."""
_NAN = float("nan")


class Columns:
    """A float32 for each line of ``metrics.jsonl``, by name; NaN where a line has none."""

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, array[float]] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line. What is not a number is left out."""
        for name, value in line.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("f")
            missing = self.rows - len(column)
            if missing > 0:
                column.extend([_NAN] * missing)
            column.append(value if isinstance(value, int | float) else _NAN)
        self.rows += 1

    def names(self) -> list[str]:
        """Return the names in their order."""
        return sorted(self._columns)

    def values(self, after: int = 0) -> np.ndarray:
        """Return [names, rows − after] float32: lines from number ``after`` on."""
        found = np.full((len(self._columns), max(self.rows - after, 0)), np.nan, np.float32)
        for row, name in enumerate(self.names()):
            column = np.asarray(self._columns[name], np.float32)[after:]
            found[row, : len(column)] = column
        return found


def thinned(values: np.ndarray, largest: int = LARGEST) -> np.ndarray:
    """Return at most ``largest`` numbers of ``values`` [names, n] float32: where there are more, equally many lines
    become two, which hold the smallest and the largest value of each name in the order in which they came."""
    names, lines = values.shape
    if names * lines <= largest:
        return values
    buckets = max(largest // (2 * names), 1)
    size = -(-lines // buckets)
    padded = np.full((names, buckets * size), np.nan, np.float32)
    padded[:, :lines] = values
    parts = padded.reshape(names, buckets, size)
    empty = np.isnan(parts)
    low = np.where(empty, np.inf, parts).argmin(axis=2)
    high = np.where(empty, -np.inf, parts).argmax(axis=2)
    order = np.stack([np.minimum(low, high), np.maximum(low, high)], axis=2)
    found: np.ndarray = np.take_along_axis(parts, order, axis=2).reshape(names, 2 * buckets)
    return found
