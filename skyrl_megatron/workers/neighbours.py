"""Who keeps a copy of whose state."""

from __future__ import annotations

from collections.abc import Sequence


def distance_to_neighbour(nodes: Sequence[str]) -> int:
    """Return how far behind each rank its neighbour is; ``nodes``: where the ranks are. The smallest distance with the
    most pairs on two nodes; 0 for one rank, which has no neighbour."""
    count = len(nodes)

    def apart(distance: int) -> int:
        return sum(nodes[rank] != nodes[(rank + distance) % count] for rank in range(count))

    return max(range(1, count), key=lambda distance: (apart(distance), -distance), default=0)


def holders(new: Sequence[int], distance: int, count: int) -> dict[int, int] | None:
    """Return which rank has the copy of each ``new`` one of ``count``; None where such a rank is new itself."""
    found = {rank: (rank + distance) % count for rank in new}
    return None if set(found.values()) & set(new) else found
