"""How far a run is in its data, where younger groups may be done before older ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class DoneGroups:
    """The groups that are trained or given up: those numbered below ``oldest``, and those in ``ahead``."""

    def __init__(self, oldest: int = 0, ahead: Iterable[int] = ()) -> None:
        self.oldest, self.ahead = oldest, set(ahead)

    def __contains__(self, number: int) -> bool:
        return number < self.oldest or number in self.ahead

    def add(self, number: int) -> None:
        """Note that a group is done."""
        self.ahead.add(number)
        while self.oldest in self.ahead:
            self.ahead.remove(self.oldest)
            self.oldest += 1

    def state(self) -> dict[str, Any]:
        """Return it as plain values, for a checkpoint."""
        return {"oldest": self.oldest, "ahead": sorted(self.ahead)}
