"""How many groups are sampled at the same time."""

from __future__ import annotations

from collections.abc import Callable


class Concurrency:
    """A limit that follows what engines have places for: a request that waits for one only makes its group older.

    ``most``: the limit never exceeds it; ``free``: counts the places that engines have left, negative where requests
    wait; None: the limit stays at ``most``. ``samples``: requests of a group.
    """

    def __init__(self, most: int, free: Callable[[], int] | None = None, samples: int = 1) -> None:
        self.most, self.free, self.samples = most, free, samples
        self.limit = most

    def start(self) -> None:
        """Begin with as many groups as there are places for."""
        if self.free is not None:
            self.limit = self._within(self.free() // self.samples)

    def measure(self, running: int) -> None:
        """Look at the places as a group is done and ``running`` are left: one group less while requests wait, one more
        where the limit kept a whole one from being there."""
        if self.free is None:
            return
        free = self.free()
        if free < 0:
            self.limit = self._within(min(self.limit, running + 1) - 1)
        elif free > self.samples and running + 1 >= self.limit:  # more than what the group has just left
            self.limit = self._within(self.limit + 1)

    def _within(self, limit: int) -> int:
        return max(1, min(limit, self.most))
